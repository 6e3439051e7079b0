"""Checkpoint engine of NeMo-RL: its refits as updates through the service, each a version.

NeMo-RL makes it by ``policy.generation.refit_transport: weighbridge.integrations.nemo_rl:WeighbridgeCheckpointEngine``, in policy workers and in vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.weight_updates import Update, UpdateReceiver, UpdateSender, buffers_within


class WeighbridgeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # NeMo-RL is seen as untyped
    """One worker's end of the refits of a NeMo-RL job.

    Workers are told of each other once, and refits have no number: both sides count them.

    Args:
        bucket_size: bytes of the largest batch that a rollout is given, of more tensors than one; and the most that a policy worker needs beside
            the tensor that it gathers.
        release_after_refit: NeMo-RL's own, and not used.
        model, server, hf_dir, dtype, run, cast, device, lane, retry_seconds, timeout_seconds: as for verl
            (`weighbridge.integrations.verl.WeighbridgeCheckpointEngine`).

    Attributes:
        pushed: the newest push of this policy worker.
    """

    shard_expert_weights = False

    def __init__(
        self,
        *,
        bucket_size: int,
        model: str,
        server: str | None = None,
        hf_dir: str | None = None,
        dtype: str = "",
        run: str = "default",
        cast: str = "allow",
        device: str | None = None,
        lane: str | None = None,
        retry_seconds: float = 60.0,
        timeout_seconds: float = 600.0,
        release_after_refit: bool = False,
    ) -> None:
        self.pushed: PushHandle | None = None
        self._bucket = bucket_size
        self._source = ModelSource(model, server, lane, retry_seconds)
        self._hf_dir, self._dtype, self._run, self._cast = hf_dir, dtype, run, cast
        self._device_name = device
        self._timeout = timeout_seconds
        self._ticket = ""
        self._refits = 0
        self._rank, self._ranks = 0, 1

    def prepare(self) -> dict[str, Any]:
        """What the other workers are told: a ticket, of which the first worker's is used."""
        return {"ticket": Update.new().ticket}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Take note of the ticket; the first worker registers the model."""
        self._begin(metadata)
        self._rank, self._ranks = worker_rank, train_world_size
        if worker_rank == 0 and self._hf_dir is not None:
            self._sender.register(self._hf_dir, self._dtype)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Take note of the ticket."""
        self._begin(metadata)

    def get_target_weight_layout(self) -> None:
        """Megatron's workers ask which experts to select for a peer: none has a peer."""

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Push this worker's share of each tensor, and wait until rollouts can pull the version.

        Raises:
            As `TrainerClient.push_gathered`, and VersionFailed: the version could not be completed.
        """
        self.pushed = handle = self._sender.send(
            self._next(),
            weights,
            step=None,
            rank=self._rank,
            ranks=self._ranks,
            buffer_bytes=buffers_within(self._bucket),
        )
        await asyncio.to_thread(handle.wait, VersionState.READY)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Pull the refit's tensors, whole, once all policy workers have pushed, in batches that fit into a bucket.

        Raises:
            WeighbridgeError: as `UpdateReceiver.receive`.
        """
        batch: list[tuple[str, torch.Tensor]] = []
        size = 0
        receiving = self._receiver.receive(self._next(), self._device(), lambda: False)
        async with aclosing(receiving) as tensors:
            async for name, tensor in tensors:
                if batch and size + tensor.nbytes > self._bucket:
                    yield batch
                    batch, size = [], 0
                batch.append((name, tensor))
                size += tensor.nbytes
        yield batch

    @cached_property
    def _sender(self) -> UpdateSender:
        return UpdateSender(self._source, run=self._run, cast=self._cast)

    @cached_property
    def _receiver(self) -> UpdateReceiver:
        return UpdateReceiver(self._source, timeout=self._timeout)

    def _begin(self, metadata: Sequence[Any]) -> None:
        self._ticket, self._refits = metadata[0]["ticket"], 0

    def _next(self) -> Update:
        if not self._ticket:
            raise FailedPrecondition(
                "this worker was not told of the others",
                fix="let NeMo-RL make the engines of all workers anew",
            )
        self._refits += 1
        return Update(f"{self._ticket}/{self._refits}")

    def _device(self) -> torch.device:
        if self._device_name is not None:
            return torch.device(self._device_name)
        found = torch.accelerator.current_accelerator()
        if found is None:
            return torch.device("cpu")
        return torch.device(found.type, torch.accelerator.current_device_index())
