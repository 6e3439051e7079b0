"""Checkpoint engine ``weighbridge`` of verl: its calls, as those of an `UpdateSender` and an `UpdateReceiver`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, Literal

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.weight_updates import Update, UpdateReceiver, UpdateSender, buffers_within

NAME = "weighbridge"
"""Of the backend."""
VERSION = "weighbridge/version"
"""The metric that says which version an update has become."""


class WeighbridgeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is seen as untyped
    """One worker's end of the updates of a verl job. Each update is a version of the model.

    Actors push what verl gathers, each rank its share of each tensor; rollouts pull whole tensors and hand them to verl. The arguments after
    ``is_master`` are the entries of ``engine_kwargs.weighbridge``.

    Args:
        bucket_size: bytes; the most that an actor needs beside the tensor that it is given.
        is_master: whether this is the actor that registers the model.
        model: ``namespace/name``.
        server: ``host:port`` of the service's gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        hf_dir: folder with ``config.json`` and the tokenizer, by which the model is registered; not needed if it is registered.
        dtype: that it is registered with, such as ``bf16``; by default what the folder says.
        run: name of the training run; part of the versions' lineage.
        mode: ``tensors`` lets verl hand whole tensors to its engines; ``slices`` lets vLLM with weighbridge's plug-in pull what each of its ranks
            holds, and needs `WeighbridgeManager`.
        cast: which casts to the registered dtype a push may make, as for `TrainerClient.push_state_dict`.
        device: where rollouts get their tensors; by default on the device that verl has chosen.
        lane: how weights travel: ``grpc``, ``local`` or ``auto``.
        retry_seconds: how long to keep trying when the service cannot be reached.
        timeout_seconds: within which actors must have begun to push, once rollouts wait for it.

    Attributes:
        pushed: the newest push of this actor.

    Raises:
        InvalidArgument: there is no such mode, lane or port.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        model: str,
        server: str | None = None,
        hf_dir: str | None = None,
        dtype: str = "",
        run: str = "default",
        mode: Literal["tensors", "slices"] = "tensors",
        cast: str = "allow",
        device: str | None = None,
        lane: str | None = None,
        retry_seconds: float = 60.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        if mode not in ("tensors", "slices"):
            raise InvalidArgument(f"there is no mode {mode!r}", fix="use tensors or slices")
        self.is_master = is_master
        self.pushed: PushHandle | None = None
        self._source = ModelSource(model, server, lane, retry_seconds)
        self._buffer_bytes = buffers_within(bucket_size)
        self._hf_dir, self._dtype, self._run, self._cast = hf_dir, dtype, run, cast
        self._mode = mode
        self._device_name = device
        self._timeout = timeout_seconds
        self._update: Update | None = None
        self._rank, self._ranks = 0, 1

    def prepare(self) -> dict[str, Any]:
        """Register the model, on the actor that does so."""
        if self.is_master and self._hf_dir is not None:
            self._sender.register(self._hf_dir, self._dtype)
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, _metadata: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Begin an update: what all workers are told of it. Nobody is told of the others: they meet at the service."""
        ticket = Update.new().ticket
        actors: dict[str, list[Any]] = {
            "ticket": [ticket] * actor_wg_world_size,
            "rank": list(range(actor_wg_world_size)),
            "world_size": [actor_wg_world_size] * actor_wg_world_size,
        }
        return actors, {"ticket": [ticket] * rollout_world_size}

    def init_process_group(
        self, ticket: str, rank: int = 0, world_size: int = 1, version: str | int | None = None
    ) -> None:
        """Take note of an update. One that is still being waited for is superseded.

        Args:
            ticket: of the update.
            rank, world_size: which actor of how many this is.
            version: which version the update has become, if that is known.
        """
        self._update = Update(ticket, version)
        self._rank, self._ranks = rank, world_size

    def finalize(self) -> None:
        """The update is over."""
        self._update = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push this actor's share of each tensor, in the calling thread, and wait until rollouts can pull the version.

        Args:
            weights: name and whole tensor of each; taken to the end in any case, since other actors gather them together with this one.
            global_steps: the version's step; by default how many updates there were.

        Returns:
            Metrics, on the master: the version's number, the seconds that the push took, and whether the version is held.

        Raises:
            As `TrainerClient.push_gathered`, and VersionFailed: the version could not be completed.
        """
        started = time.monotonic()
        self.pushed = handle = self._sender.send(
            self._told(),
            weights,
            step=global_steps,
            rank=self._rank,
            ranks=self._ranks,
            buffer_bytes=self._buffer_bytes,
        )
        version = await asyncio.to_thread(handle.wait, VersionState.READY)
        if not self.is_master:
            return {}
        return {
            VERSION: version.number,
            "weighbridge/push_seconds": time.monotonic() - started,
            "weighbridge/held": float(bool(version.held)),
        }

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Pull the update's tensors, whole, once all actors have pushed; none of them has been given to verl if one has failed.

        Raises:
            WeighbridgeError: as `UpdateReceiver.receive`.
        """
        if self._mode == "slices":
            raise FailedPrecondition(
                "in mode slices verl has no tensors to hand to engines: they pull their own slices",
                fix="set rollout.checkpoint_manager_class=weighbridge.integrations.verl.WeighbridgeManager",
            )
        update = self._told()
        receiving = self._receiver.receive(update, self._device(), lambda: self._update is not update)
        async with aclosing(receiving) as tensors:
            async for each in tensors:
                yield each

    @cached_property
    def _sender(self) -> UpdateSender:
        return UpdateSender(self._source, run=self._run, cast=self._cast)

    @cached_property
    def _receiver(self) -> UpdateReceiver:
        return UpdateReceiver(self._source, timeout=self._timeout)

    def _told(self) -> Update:
        if self._update is None:
            raise FailedPrecondition(
                "this worker was not told of an update", fix="call init_process_group first"
            )
        return self._update

    def _device(self) -> torch.device:
        if self._device_name is not None:
            return torch.device(self._device_name)
        name: str = get_device_name()
        return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())


CheckpointEngineRegistry.register(NAME)(WeighbridgeCheckpointEngine)
