"""Checkpoint engine of NeMo-RL: each refit is an update through the service, and becomes a version.

NeMo-RL creates it in policy workers and in vLLM's workers if ``policy.generation.refit_transport:
weighbridge.integrations.nemo_rl:WeighbridgeCheckpointEngine`` is set.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.weight_updates import UpdateWorker, WeightUpdate, WorkerSettings


class WeighbridgeCheckpointEngine(UpdateWorker, CheckpointEngine):  # type: ignore[misc]  # NeMo-RL is seen as untyped
    """One worker's end of the refits of a NeMo-RL job.

    Workers receive each other's metadata once. Refits have no number, so both sides count them.

    Args:
        bucket_size: maximum bytes of a batch of several tensors that a rollout receives; also the maximum that a policy
            worker uses in addition to the tensor that it gathers.
        release_after_refit: argument of NeMo-RL; not used.
        settings: the fields of `WorkerSettings`.

    Raises:
        InvalidArgument: a setting, lane or port does not exist.
    """

    shard_expert_weights = False

    def __init__(self, *, bucket_size: int, release_after_refit: bool = False, **settings: Any) -> None:
        super().__init__(WorkerSettings.read(settings, type(self).__name__))
        self._bucket = bucket_size
        self._ticket = ""
        self._refits = 0

    def prepare(self) -> dict[str, Any]:
        """Metadata for the other workers: a ticket. All workers use the first worker's ticket."""
        return {"ticket": WeightUpdate.new().ticket}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Record the ticket; the first worker registers the model."""
        self._begin(metadata)
        self._rank, self._ranks = worker_rank, train_world_size
        if worker_rank == 0:
            self._sender.register()

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Record the ticket."""
        self._begin(metadata)

    def get_target_weight_layout(self) -> None:
        """Megatron's workers ask which experts to select for a peer; here workers have no peers."""

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Push this worker's share of each tensor, and wait until rollouts can pull the version.

        Raises:
            As `TrainerClient.push_gathered`, and VersionFailed: the version could not be completed.
        """
        await self._push(self._next(), weights, None, self._bucket)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Pull the refit's whole tensors once all policy workers have pushed, in batches that fit into a bucket.

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

    def _begin(self, metadata: Sequence[Any]) -> None:
        self._ticket, self._refits = metadata[0]["ticket"], 0

    def _next(self) -> WeightUpdate:
        if not self._ticket:
            raise FailedPrecondition(
                "this worker was not connected to the others",
                fix="let NeMo-RL create the engines of all workers again",
            )
        self._refits += 1
        return WeightUpdate(f"{self._ticket}/{self._refits}")

    def _device(self) -> torch.device:
        if self._settings.device is not None:
            return torch.device(self._settings.device)
        found = torch.accelerator.current_accelerator()
        if found is None:
            return torch.device("cpu")
        return torch.device(found.type, torch.accelerator.current_device_index())
