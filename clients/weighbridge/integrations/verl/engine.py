"""Checkpoint engine ``weighbridge`` of verl: maps its calls to an `UpdateSender` and an `UpdateReceiver`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.integrations.weight_updates import PluginSettings, UpdateWorker, WeightUpdate, WorkerSettings

NAME = "weighbridge"
"""Name of the backend."""
VERSION = "weighbridge/version"
"""Metric with the version number of an update."""


@dataclass(frozen=True)
class VerlSettings(WorkerSettings, PluginSettings):
    """Entries of ``engine_kwargs.weighbridge``.

    Attributes:
        mode: with ``tensors``, verl passes whole tensors to its engines; with ``slices``, each rank of vLLM with
            weighbridge's plug-in pulls its own slices, which requires `WeighbridgeManager`.
    """

    mode: str = "tensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("tensors", "slices"):
            raise InvalidArgument(f"there is no mode {self.mode!r}", fix="use tensors or slices")

    @staticmethod
    def of(given: Mapping[str, Any]) -> VerlSettings:
        """Read the entries. Raises InvalidArgument as `ModelSource.read`."""
        return VerlSettings.read(given, f"engine_kwargs.{NAME}")


class WeighbridgeCheckpointEngine(UpdateWorker, CheckpointEngine):  # type: ignore[misc]  # verl is seen as untyped
    """One worker's end of the updates of a verl job. Each update is a version of the model.

    Each actor rank pushes its share of each tensor that verl gathers. Rollouts pull whole tensors and pass them to
    verl.

    Args:
        bucket_size: maximum bytes that an actor uses in addition to the tensor that it receives.
        is_master: whether this is the actor that registers the model.
        settings: the entries of ``engine_kwargs.weighbridge``, which are the fields of `VerlSettings`.

    Raises:
        InvalidArgument: a setting, mode, lane or port does not exist.
    """

    _settings: VerlSettings

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        super().__init__(VerlSettings.of(settings))
        self.is_master = is_master
        self._bucket = bucket_size
        self._update: WeightUpdate | None = None

    def prepare(self) -> dict[str, Any]:
        """Register the model, on the actor that does so."""
        if self.is_master:
            self._sender.register()
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, _metadata: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Begin an update: create the arguments of all workers. Workers receive no information about each other; they
        find each other through the service.
        """
        ticket = WeightUpdate.new().ticket
        actors: dict[str, list[Any]] = {
            "ticket": [ticket] * actor_wg_world_size,
            "rank": list(range(actor_wg_world_size)),
            "world_size": [actor_wg_world_size] * actor_wg_world_size,
        }
        return actors, {"ticket": [ticket] * rollout_world_size}

    def init_process_group(
        self, ticket: str, rank: int = 0, world_size: int = 1, version: str | int | None = None
    ) -> None:
        """Record an update. It supersedes an earlier update that is still pending.

        Args:
            ticket: ticket of the update.
            rank, world_size: this actor, and the number of actors.
            version: version of the update, if known.
        """
        self._update = WeightUpdate(ticket, version)
        self._rank, self._ranks = rank, world_size

    def finalize(self) -> None:
        """End the update."""
        self._update = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push this actor's share of each tensor, in the calling thread, and wait until rollouts can pull the version.

        Args:
            weights: name and whole tensor of each. Always consumed to the end, because other actors gather them
                together with this one.
            global_steps: the version's step; by default the number of updates so far.

        Returns:
            Metrics, on the master: the version's number, the duration of the push in seconds, and whether the version
            is held.

        Raises:
            As `TrainerClient.push_gathered`, and VersionFailed: the version could not be completed.
        """
        started = time.monotonic()
        version = await self._push(self._told(), weights, global_steps, self._bucket)
        if not self.is_master:
            return {}
        return {
            VERSION: version.number,
            "weighbridge/push_seconds": time.monotonic() - started,
            "weighbridge/held": float(bool(version.held)),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Pull the update's whole tensors once all actors have pushed. If an actor failed, verl receives none of them.

        Raises:
            WeighbridgeError: as `UpdateReceiver.receive`.
        """
        if self._settings.mode == "slices":
            raise FailedPrecondition(
                "in mode slices verl has no tensors to hand to engines: they pull their own slices",
                fix=(
                    "add +actor_rollout_ref.rollout.checkpoint_manager_class="
                    "weighbridge.integrations.verl.WeighbridgeManager"
                ),
            )
        update = self._told()
        receiving = self._receiver.receive(update, self._device(), lambda: self._update is not update)
        async with aclosing(receiving) as tensors:
            async for each in tensors:
                yield each

    def _told(self) -> WeightUpdate:
        if self._update is None:
            raise FailedPrecondition("this worker has not received an update", fix="call init_process_group first")
        return self._update

    def _device(self) -> torch.device:
        if self._settings.device is not None:
            return torch.device(self._settings.device)
        name: str = get_device_name()
        return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())


CheckpointEngineRegistry.register(NAME)(WeighbridgeCheckpointEngine)
