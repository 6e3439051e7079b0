"""Updater of weights for slime and Miles: Megatron ranks push the shards that they hold, and each rank of SGLang pulls
its own slices.

``--custom-megatron-init-path weighbridge.integrations.slime.init`` replaces ``UpdateWeightFromDistributed`` with it in
each trainer actor.
"""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import ray
import torch
import torch.distributed as dist

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import Version, VersionState
from weighbridge._trainers.states.megatron_chunks import sharded_chunks
from weighbridge._transport.addresses import Addresses
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from weighbridge.follow.sglang import PAUSE_MODES, SglangServer
from weighbridge.follow.updates import update
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, RanksFailed, exchange
from weighbridge.integrations.weight_updates import TICKET, PluginSettings, WeightUpdate

NAME = "weighbridge"
"""Name of the argument that contains the settings."""
_FRAMEWORKS = ("slime", "miles")
_REPLACED = "UpdateWeightFromDistributed"
_CHOSEN_BY = {
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
    "update_weight_transfer_mode": "broadcast",
}
"""Values of slime's and Miles's arguments that choose this updater; each framework supports a subset of them."""


def init(args: Namespace) -> None:
    """Install the updater, for ``--custom-megatron-init-path``: from now on the trainer actor of this process creates a
    `WeighbridgeUpdater`.

    Raises:
        InvalidArgument: the arguments contain no settings, or choose another updater.
        FailedPrecondition: this process is not a trainer actor of slime or Miles, or its updaters have unknown names.
    """
    SlimeSettings.of(args)
    if getattr(args, "colocate", False):
        raise InvalidArgument(
            "with --colocate engines get weights on the GPUs that they share with trainers, and none would be pushed",
            fix="leave out --colocate, or --custom-megatron-init-path",
        )
    for name, wanted in _CHOSEN_BY.items():
        if (found := getattr(args, name, wanted)) != wanted:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(
                f"{option} {found} chooses an updater that is not weighbridge's", fix=f"{option} {wanted}"
            )
    framework, actor = _trainer_actor()
    groups = importlib.import_module(f"{framework}.utils.distributed_utils")
    setattr(actor, _REPLACED, partial(WeighbridgeUpdater, group=groups.get_gloo_group))


@dataclass(frozen=True)
class SlimeSettings(PluginSettings):
    """Settings under ``weighbridge`` in a file of ``--custom-config-path``.

    The folder is by default that of ``--hf-checkpoint``.

    Attributes:
        pause_mode: what happens to running requests, as for `SglangServer`; by default Miles's
            ``--pause-generation-mode``, or ``abort``, as slime does.
        timeout_seconds: timeout of each call to an engine; for a fetch of a version, of the whole fetch.
        push_timeout_seconds: time within which the shards of all ranks must arrive; by default less than the 30 minutes
            after which gloo's ranks give up waiting for each other.
    """

    pause_mode: str = "abort"
    timeout_seconds: float = 600.0
    push_timeout_seconds: float = 1500.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pause_mode not in PAUSE_MODES:
            raise InvalidArgument(
                f"there is no pause mode {self.pause_mode!r}", fix=f"use one of {', '.join(PAUSE_MODES)}"
            )

    @staticmethod
    def of(args: Namespace) -> SlimeSettings:
        """Read slime's or Miles's arguments.

        Raises:
            InvalidArgument: there are no settings, one is unknown or of another type, or the pause mode is unknown.
        """
        said = getattr(args, NAME, None)
        if not isinstance(said, Mapping) or "model" not in said:
            raise InvalidArgument(
                f"the arguments have no {NAME}.model",
                fix=(
                    f"put '{NAME}: {{model: acme/policy, server: 10.0.0.1:50051}}' into a file, "
                    "and pass the file with --custom-config-path"
                ),
            )
        defaults = {
            "hf_dir": getattr(args, "hf_checkpoint", ""),
            "pause_mode": getattr(args, "pause_generation_mode", "abort"),
        }
        return SlimeSettings.read({**defaults, **said}, NAME)


class WeighbridgeUpdater:
    """Updater of one Megatron rank. Every update becomes a version of the model.

    The version's step is the number of the update.

    Args:
        args: slime's or Miles's arguments.
        model: this rank's chunks.
        weights_getter, model_name: for gathered weights; not used.
        quantization_config: of the checkpoint that engines start from.
        is_lora: whether only adapters are trained.
        group: returns the group in which the ranks agree. It contains all ranks and communicates over host memory; by
            default the default group.

    Attributes:
        weight_version: number of the newest update; slime sets it when training resumes.
        pushed: this rank's newest push.

    Raises:
        InvalidArgument: as `SlimeSettings.of`; or the engines require quantised weights, or adapters.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        *,
        model_name: str = "",
        quantization_config: Mapping[str, Any] | None = None,
        is_lora: bool = False,
        group: Callable[[], dist.ProcessGroup | None] = lambda: None,
    ) -> None:
        if quantization_config:
            raise InvalidArgument(
                (
                    "engines of this checkpoint need quantised weights, but Megatron's ranks push "
                    "their weights as they are"
                ),
                fix="start engines from a checkpoint that is not quantised: --hf-checkpoint",
            )
        if is_lora:
            raise InvalidArgument(
                "adapters are not a version of the model", fix="train all weights, or use another updater"
            )
        self.weight_version = 0
        self.pushed: PushHandle | None = None
        self._settings = SlimeSettings.of(args)
        self._model = model
        self._group = group
        self._client = self._settings.trainer()
        self._handles: Sequence[Any] | None = None
        self._servers: dict[str, SglangServer] | None = None
        self._fresh = False
        self._ticket = ""
        self._metrics: dict[str, float] = {}

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        """Record the Ray handles of the engines.

        When the first rank updates the engines, it asks them for the addresses of their servers.

        The other arguments are for GPU groups and are not used.
        """
        self._handles, self._servers, self._fresh = rollout_engines, None, True

    def disconnect_rollout_engines(self) -> None:
        """Forget the engines."""
        self._handles, self._servers, self._fresh = None, None, False

    def is_rollout_engines_fresh(self) -> bool:
        """Whether engines are known (Miles)."""
        return self._fresh

    def mark_engine_connection_stale(self) -> None:
        """Require that the engines are passed again (Miles)."""
        self._fresh = False

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of the newest update, returned once on each rank: the version's number and whether it is held,
        seconds until it could be pulled, seconds and bytes of the engines' fetches, and seconds for which the engines
        were paused.
        """
        found, self._metrics = self._metrics, {}
        return found

    def update_weights(self) -> None:
        """Push this rank's shards, and update all engines to the version that the ranks push together.

        All ranks call it.

        Engines serve until the last of them has fetched its bytes; then they pause, apply the bytes and resume.

        Raises:
            RanksFailed: on all ranks. A rank cannot push, the version could not be completed, or an engine did not
                apply it; states which, and why. Engines that can resume do so. No engine was changed before the version
                was complete.
        """
        self.weight_version += 1
        ranks = ProcessGroup(self._group())
        if not self._ticket:
            self._ticket = exchange(ranks, "not all ranks can push their weights", self._begin)[0]
        try:
            self._metrics = exchange(ranks, f"update {self.weight_version} has failed", self._move)[0]
        except RanksFailed:
            self._ticket = ""
            raise

    def _begin(self) -> str:
        """Check that this rank can push, before the first update and after a failed one: otherwise the other ranks
        would wait for it. The first rank registers the model if it is not registered yet.

        Returns:
            Ticket that, with the number of the update, joins the ranks' pushes into one version.
        """
        settings = self._settings
        self._weights()
        try:
            self._client.model(settings.model)
        except NotFound:  # or the first rank is registering it
            if dist.get_rank(self._group()) == 0:
                self._client.register_model(settings.model, settings.hf_dir or "", dtype=settings.dtype)
        return WeightUpdate.new().ticket

    def _weights(self) -> dict[str, Any]:
        return sharded_chunks(self._model)

    def _move(self) -> dict[str, float]:
        """Push this rank's shards and, on the first rank, update the engines to the version.

        The first rank returns the metrics.
        """
        started = time.monotonic()
        ranks = ProcessGroup(self._group())
        ticket = f"{self._ticket}/{self.weight_version}"
        self.pushed = handle = self._client.push(
            self._settings.model,
            self._weights(),
            step=self.weight_version,
            rank=ranks.rank,
            world_size=ranks.size,
            cast=self._settings.cast,
            request_id=ticket,
            metadata={TICKET: ticket},
        )
        timeout = self._settings.push_timeout_seconds
        if ranks.rank:
            handle.report(timeout)
            return {}
        # one rank waits for all: a ready version means that every rank has pushed; the other ranks receive the outcome
        # from this one
        version = handle.wait(VersionState.READY, timeout=timeout)
        return self._bring(version, time.monotonic() - started)

    def _bring(self, version: Version, push_seconds: float) -> dict[str, float]:
        """Update the engines to a version, under the label that slime and Miles compare.

        Returns the update's metrics.
        """
        if self._servers is None:
            self._servers = self._connected()
        done = update(self._servers, version.number, str(self.weight_version))
        found = {
            "version": version.number,
            "held": float(bool(version.held)),
            "push_seconds": push_seconds,
            "prepare_seconds": done.prepare_seconds,
            "pause_seconds": done.pause_seconds,
            "engine_bytes": done.nbytes,
        }
        return {f"{NAME}/{name}": value for name, value in found.items()}

    def _connected(self) -> dict[str, SglangServer]:
        """The servers of the engines, by URL.

        Raises:
            FailedPrecondition: no engine has a server that an update could reach.
            DeadlineExceeded: the actor of an engine does not report the address of its server.
        """
        urls = _urls(self._handles or (), self._settings.timeout_seconds)
        if not urls:
            raise FailedPrecondition(
                f"none of {len(self._handles or ())} engines has a server that could be updated",
                fix="call connect_rollout_engines, with running engines, before update_weights",
            )
        return {url: self._server(url) for url in urls}

    def _server(self, url: str) -> SglangServer:
        settings = self._settings
        return SglangServer(
            url,
            str(Addresses.of(settings.of_engines.server)),
            settings.model,
            lane=settings.lane,
            pause_mode=settings.pause_mode,
            timeout=settings.timeout_seconds,
            stale_drafter=settings.drafter,
        )


def _trainer_actor() -> tuple[str, ModuleType]:
    """The framework of this process, and the module that defines the trainer actor.

    The module contains the name of the updater to replace.
    """
    for framework in _FRAMEWORKS:
        module = sys.modules.get(f"{framework}.backends.megatron_utils.actor")
        if module is not None and hasattr(module, _REPLACED):
            return framework, module
    raise FailedPrecondition(
        f"no {_REPLACED} of slime's or Miles's trainer actors is in this process",
        fix="pass weighbridge.integrations.slime.init to --custom-megatron-init-path of slime 0.3.1 or newer, or Miles",
    )


def _urls(engines: Sequence[Any], timeout: float) -> list[str]:
    """Server URLs of the engines. A part of an engine that runs on a different node than its server has no URL."""
    asked = [
        engine.get_url.remote() if hasattr(engine, "get_url") else engine.get_topology_info.remote()
        for engine in engines
    ]
    try:
        answers = ray.get(asked, timeout=timeout)
    except TimeoutError as error:  # Ray's own derives from it
        raise DeadlineExceeded(
            f"not all actors of {len(asked)} engines reported the addresses of their servers within {timeout:g} s",
            fix="see in Ray's dashboard which of them hangs",
        ) from error
    found = []
    for said in answers:
        if isinstance(said, Mapping):  # Miles
            found += [said["url"]] if said["node_rank"] == 0 else []
        elif said is not None:
            found.append(said)
    return found
