"""Manager of updates for verl: rollouts generate until the new version is complete.

verl's own manager stops them before actors begin to gather. Here a failed push reaches no engine, replicas that start
later load the newest version from the service, and engines with weighbridge's plug-in pull their own slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from weighbridge._core.resources import REF_LIVE, Version
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.verl.engine import NAME, VERSION, VerlSettings


class WeighbridgeManager(CheckpointEngineManager):  # type: ignore[misc]  # verl is seen as untyped
    """``rollout.checkpoint_manager_class``. With a backend other than ``weighbridge``, it behaves like verl's own.

    Args:
        config: verl's ``CheckpointEngineConfig``.
        actor_wg: the actors.
        replicas: replicas of rollouts.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        settings = VerlSettings.of({"model": "", **config.engine_kwargs.get(NAME, {})})
        self._source, self._init_info = settings.of_engines, settings.init_info
        self._slices = settings.mode == "slices"

    @auto_await  # type: ignore[untyped-decorator]  # verl is seen as untyped
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Push the actors' weights, and update all replicas once the version is complete.

        Args:
            global_steps: the training step.

        Returns:
            The actors' metrics.

        Raises:
            RayTaskError: an actor failed, and no replica was changed. Or a worker of a replica failed: in mode
                ``tensors`` that replica does not generate until an update has succeeded; in mode ``slices`` it
                continues with its previous version. A note lists the versions of the replicas.
        """
        if self.backend != NAME:
            metrics: dict[str, Any] = await super().update_weights(global_steps)
            return metrics
        count = self.actor_wg.world_size
        await _on_all(self.actor_wg, "prepare")
        told, _ = self.backend_cls.build_topology(count, 0, [])
        await _on_all(self.actor_wg, "init_process_group", **told)
        found = await asyncio.gather(*self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        await _on_all(self.actor_wg, "finalize")
        metrics = {key: value for each in found for key, value in (each or {}).items()}
        await self._bring(self.replicas, told["ticket"][0], metrics.get(VERSION), global_steps)
        return metrics

    @auto_await  # type: ignore[untyped-decorator]  # verl is seen as untyped
    async def catch_up(self, replicas: Sequence[Any], version: str | int = REF_LIVE) -> Version:
        """Update replicas that were started or restarted to a version, without the actors.

        Args:
            replicas: which ones.
            version: a number or a ref.

        Returns:
            The version.

        Raises:
            NotFound: the version does not exist.
            RayTaskError: a worker of a replica failed.
        """
        found = await asyncio.to_thread(self._version, version)
        await self._bring(replicas, "", found.number, found.step)
        return found

    def _version(self, version: str | int) -> Version:
        with self._source.connect() as client:
            return client.version(self._source.model, version)

    async def _bring(self, replicas: Sequence[Any], ticket: str, number: int | None, step: int | None) -> None:
        if self._slices:
            if number is None:
                raise FailedPrecondition("the actors' metrics do not contain the version that they have pushed")
            await _on_each([self._bring_slices(replica, int(number), step) for replica in replicas], int(number))
        else:
            await self._bring_tensors(replicas, ticket, number, step)

    async def _bring_tensors(self, replicas: Sequence[Any], ticket: str, number: int | None, step: int | None) -> None:
        """Let workers pull whole tensors, and verl pass them to its engines. After a failure, engines have no weights,
        because verl's release of the KV cache also releases the weights. So they do not resume.
        """
        workers = [worker for replica in replicas for worker in replica.workers]
        rollouts = RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker)),
        )
        count = len(workers)
        await _all(replica.abort_all_requests() for replica in replicas)
        await _all(replica.release_kv_cache() for replica in replicas)
        await _on_all(rollouts, "init_process_group", ticket=[ticket] * count, version=[number] * count)
        await _all(rollouts.update_weights(global_steps=step))
        await _on_all(rollouts, "finalize")
        await _all(replica.resume_kv_cache() for replica in replicas)
        await _all(replica.resume_generation() for replica in replicas)

    async def _bring_slices(self, replica: Any, number: int, step: int | None) -> None:
        """Let the ranks of an engine pull their slices through its weight-transfer engine.

        The engine pauses only for the last step.
        """
        server = _server_of(replica)

        async def ask(method: str, **arguments: Any) -> None:
            await server.collective_rpc.remote(method, kwargs=arguments)

        info = {**self._init_info, "version": str(number)}
        await ask("init_weight_transfer_engine", init_info=info)
        await ask("start_weight_update")
        try:
            await ask("update_weights", update_info={"version": number, "phase": "prepare"})
            await replica.abort_all_requests()
            try:
                await ask("update_weights", update_info={"version": number, "phase": "apply"})
                await replica.clear_kv_cache()
                if step is not None:
                    await server.set_global_steps.remote(step)
            finally:
                await replica.resume_generation()
        except BaseException:
            with suppress(Exception):  # vLLM requires it before the next update, and raises the same error
                await ask("finish_weight_update")
            raise
        await ask("finish_weight_update")


def _server_of(replica: Any) -> Any:
    """Server that reaches all ranks of a replica. Raises FailedPrecondition if there is none."""
    split = getattr(replica.config, "disaggregation", None)
    if replica.config.data_parallel_size != 1 or (split is not None and split.enabled):
        raise FailedPrecondition(
            "in mode slices a replica has one server for all of its ranks: no data parallelism, and no disaggregation",
            fix="use mode tensors, or more replicas instead",
        )
    return replica.servers[0]


async def _on_all(workers: Any, method: str, **arguments: Sequence[Any]) -> None:
    """Call a method of the checkpoint engine of each worker, with its own arguments."""
    count = workers.world_size
    await _all(workers.execute_checkpoint_engine(method=[method] * count, **arguments))


async def _on_each(calls: Sequence[Awaitable[None]], number: int) -> None:
    """Wait until all replicas have ended.

    Raises the error of the first that failed, with a note that lists which replicas have the version.
    """
    ended = await asyncio.gather(*calls, return_exceptions=True)
    failed = {index: each for index, each in enumerate(ended) if isinstance(each, BaseException)}
    if not failed:
        return
    error = next(iter(failed.values()))
    took = [index for index in range(len(ended)) if index not in failed]
    error.add_note(
        f"of {len(ended)} replicas, {', '.join(map(str, failed))} have not taken version {number}; "
        f"{', '.join(map(str, took)) or 'none'} have"
    )
    raise error


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all tasks, then raise the error of the first that failed, if any."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
