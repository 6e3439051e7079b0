"""A verl job on CPUs: real actors and checkpoint-engine workers on Ray, of verl's own test helpers.

Asked over a pipe what it is to do.

Runs in verl's environment, with verl's sources first in PYTHONPATH: ``tests`` is verl's there.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import ray
from cpu_platform import RESOURCE
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray.base import RayResourcePool, split_resource_pool
from verl.workers.config import CheckpointEngineConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig
from verl_workers import Actor, MegatronActor, RolloutWorker, start_slices

from tests.checkpoint_engine import test_utils as helpers
from weighbridge.integrations.verl import WeighbridgeCheckpointEngine, WeighbridgeManager


class Job:
    """One job; its methods are what it can be asked."""

    def start(
        self,
        folder: str,
        said: dict[str, Any],
        actors: int,
        rollouts: int,
        bucket_mb: int = 1,
        trainer: str = "fsdp2",
    ) -> None:
        """Actors with FSDP2 or Megatron, and workers of rollouts, each a replica."""
        ray.init(num_cpus=32, resources={RESOURCE: 8}, include_dashboard=False)
        helpers.TrainingWorkerTest = Actor if trainer == "fsdp2" else MegatronActor
        helpers.CheckpointEngineWorkerTest = RolloutWorker
        helpers.FSDPEngineConfig = _fsdp2
        self._model = HFModelConfig(
            path=folder,
            load_tokenizer=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
        )
        self._config = _config(said, bucket_mb)
        pool = RayResourcePool(process_on_nodes=[actors + rollouts], max_colocate_count=1)
        trainer_pool, self._rollout_pool = split_resource_pool(pool, [actors, rollouts])
        self._actors = helpers.create_trainer_worker_group(trainer_pool, self._model, self._config)
        self._actors.reset()
        self._factor = 1.0
        if rollouts:
            self._start_rollouts()

    def _start_rollouts(self) -> None:
        rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=self._config)
        self._rollouts, self._replicas = asyncio.run(
            helpers.create_rollout_worker_group(self._rollout_pool, self._model, rollout_config)
        )

    def restart_rollouts(self) -> None:
        """Kill all workers of rollouts, and start others."""
        for worker in self._rollouts.workers:
            ray.kill(worker)
        self._start_rollouts()
        self._rollouts.scale(self._factor)

    def update(self, step: int | None = None, manager: str = "verl") -> dict[str, Any]:
        """An update by verl's manager or by weighbridge's; its metrics."""
        made = CheckpointEngineManager if manager == "verl" else WeighbridgeManager
        metrics: dict[str, Any] = made(self._config, self._actors, self._replicas).update_weights(step)
        return metrics

    def begin_update(self, step: int) -> None:
        """The calls of verl's manager that begin an update; `end_update` waits for what they give."""
        manager = CheckpointEngineManager(self._config, self._actors, self._replicas)
        manager.build_process_group(self._rollouts)
        self._begun = (
            self._actors.update_weights(global_steps=step),
            self._rollouts.update_weights(global_steps=step),
        )

    def end_update(self) -> list[list[str]]:
        """The error of the update on each actor and each rollout worker; empty where there is none."""
        return [[_ended(each) for each in side] for side in self._begun]

    def catch_up(self) -> int:
        """Bring the newest version to all replicas, without the actors."""
        version = WeighbridgeManager(self._config, self._actors, self._replicas).catch_up(self._replicas)
        return int(version.number)

    def check(self) -> None:
        """verl's own comparison of what rollouts have received."""
        self._rollouts.check_weights()

    def scale(self, factor: float) -> None:
        """Multiply the actors' weights, and those that verl compares with."""
        self._factor *= factor
        self._actors.scale(factor)
        self._rollouts.scale(factor)

    def factor(self) -> float:
        """The factor by which the actors' weights have been multiplied."""
        return self._factor

    def rename(self, name: str, to: str) -> None:
        """Let actors give a tensor another name from now on."""
        self._actors.rename(name, to)

    def hold(self, path: str) -> None:
        """Let actors stop in the middle of gathering until this file is there."""
        self._actors.hold(path)

    def pushed(self) -> list[dict[str, Any]]:
        """Version number and bytes of each actor's newest push."""
        found: list[dict[str, Any]] = self._actors.pushed()
        return found

    def peaks(self, how: str) -> list[int]:
        """Bytes by which gathering all weights raises each actor's memory: ``gather`` alone, or also ``send``."""
        if how == "send":
            CheckpointEngineManager(self._config, self._actors, []).build_process_group(_Nobody())
        found: list[int] = self._actors.peak(how)
        return found

    def seconds(self, rounds: int) -> list[dict[str, list[float]]]:
        """Seconds of each round on each actor, by the adapter and by plain pushes of the same tensors."""
        found: list[dict[str, list[float]]] = self._actors.seconds(rounds)
        return found

    def start_slices(self, size: int) -> None:
        """Start replicas that are engines of tensor-parallel ranks, which hold slices."""
        engine = OmegaConf.to_container(OmegaConf.create(self._config.engine_kwargs))
        engine["weighbridge"]["mode"] = "slices"
        self._config = CheckpointEngineConfig(
            **{**_fields(self._config), "engine_kwargs": engine, "backend": "weighbridge"}
        )
        self._replicas = start_slices(self._model, self._config, size)

    def receive_in_mode_slices(self) -> None:
        """Receive weights as a rollout worker by itself does in this mode."""

        async def receive() -> None:
            engine = WeighbridgeCheckpointEngine(1 << 20, **self._config.engine_kwargs["weighbridge"])
            async for _ in engine.receive_weights():
                pass

        asyncio.run(receive())

    def slices(self) -> list[list[dict[str, Any]]]:
        """The slices of each rank of each engine, and their cost."""
        return [ray.get(replica.servers[0].report.remote()) for replica in self._replicas]

    def compose(self, lines: list[str]) -> dict[str, Any]:
        """The settings of the checkpoint engine that verl makes from lines on its command line."""
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", lines).actor_rollout_ref.rollout.checkpoint_engine
        wanted = ("backend", "custom_backend_module", "engine_kwargs")
        return {key: OmegaConf.to_object(OmegaConf.create({"it": config[key]}))["it"] for key in wanted}


class _Nobody:
    """A group of no workers."""

    world_size = 0

    def execute_checkpoint_engine(self, *_: Any, **__: Any) -> list[Any]:
        return []


def _config(said: dict[str, Any], bucket_mb: int) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(
        backend="weighbridge",
        custom_backend_module="weighbridge.integrations.verl",
        engine_kwargs={"weighbridge": said},
        update_weights_bucket_megabytes=bucket_mb,
    )


def _fields(config: CheckpointEngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _fsdp2(**fields: Any) -> FSDPEngineConfig:
    return FSDPEngineConfig(**{**fields, "strategy": "fsdp2", "use_torch_compile": False})


def _ended(reference: Any) -> str:
    try:
        ray.get(reference, timeout=120)
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    """Answer until the pipe is closed."""
    job = Job()
    with Connection(int(sys.argv[1])) as link:
        while True:
            try:
                name, arguments = link.recv()
            except EOFError:
                break
            try:
                link.send((True, getattr(job, name)(**arguments)))
            except Exception as error:
                traceback.print_exc()
                link.send((False, str(error)))
    ray.shutdown()


if __name__ == "__main__":
    main()
