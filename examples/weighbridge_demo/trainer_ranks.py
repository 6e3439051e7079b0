"""Example of a trainer that uses Weighbridge, rank by rank.

Restore into Megatron's own sharded state dict, train, push from it: `restore` and `push` are all there is to it. The
rest of this file is Megatron on CPU, and measuring.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weighbridge import PushReport, TrainerClient, Version
from weighbridge_demo.hf_from_megatron import dump_shards
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits, train_step

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

LEARNING_RATE = 1e-4
_DURABLE_SECONDS = 120.0


@dataclass(frozen=True)
class Restored:
    """Results of restoring on one rank.

    Attributes:
        rank: number of the rank.
        nbytes: bytes that it requested.
        seconds: how long the restore took, planning included.
        logits_error: largest difference from the expected logits; None on ranks that compute none.
    """

    rank: int
    nbytes: int
    seconds: float
    logits_error: float | None


@dataclass(frozen=True)
class Trained:
    """Results of one rank of the trainer.

    Attributes:
        restored: results of restoring.
        losses: one for each step; None on ranks that do not compute it.
        step_seconds: how long each step took.
        pushed: report of its push.
        version: the version once it was durable.
    """

    restored: Restored
    losses: list[float | None]
    step_seconds: list[float]
    pushed: PushReport
    version: Version


@dataclass(frozen=True)
class TrainerJob:
    """Job of all ranks of a trainer.

    Attributes:
        server: address of the service.
        model: name of the model at the service.
        config: Hugging Face configuration of the model.
        parallel: parallelism of the model.
        tokens: int64 `[1, seq]`, the input for which logits are compared.
        expected_logits: float32 `[1, seq, vocab]`.
    """

    server: str
    model: str
    config: PretrainedConfig
    parallel: Parallel
    tokens: Tensor
    expected_logits: Tensor


def restore(rank: int, job: TrainerJob) -> Restored:
    """Build the model, restore the latest version into it, and look at its logits."""
    with TrainerClient(job.server, run="demo") as trainer:
        return _restore(rank, job, trainer)[1]


def train(rank: int, job: TrainerJob, batch: Tensor, steps: int, dump: Path) -> Trained:
    """Restore the latest version, train, and push the result as a new one.

    Args:
        rank: this rank.
        job: the job of all ranks.
        batch: int64 `[rows, length + 1]`, the same for every step.
        steps: number of steps.
        dump: folder where each rank leaves a copy of its weights, for comparison.
    """
    with TrainerClient(job.server, run="demo") as trainer:
        model, restored = _restore(rank, job, trainer)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        losses, step_seconds = [], []
        for _ in range(steps):
            started = time.monotonic()
            losses.append(train_step(model, optimizer, batch[:, :-1], batch[:, 1:], job.parallel))
            step_seconds.append(time.monotonic() - started)
        # Ranks come to a checkpoint together; otherwise the first would be held up by waiting for the last.
        dist.barrier()
        handle = trainer.push(
            job.model, model.sharded_state_dict(), step=steps, rank=rank, world_size=job.parallel.world_size
        )
        pushed = handle.report(_DURABLE_SECONDS)
        version = handle.wait("durable", timeout=_DURABLE_SECONDS)
        torch.save(dump_shards(model), dump / f"rank-{rank}.pt")
        return Trained(restored, losses, step_seconds, pushed, version)


def _restore(rank: int, job: TrainerJob, trainer: TrainerClient) -> tuple[Any, Restored]:
    model = build_model(job.config, job.parallel)
    with torch.no_grad():
        # What is not restored shall not pass for a weight.
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    state = model.sharded_state_dict()
    dist.barrier()
    started = time.monotonic()
    trainer.restore(job.model, state, version="latest")
    seconds = time.monotonic() - started
    logits = forward_logits(model, job.tokens, job.parallel)
    error = None if logits is None else (logits - job.expected_logits).abs().max().item()
    return model, Restored(rank, _nbytes(state), seconds, error)


def _nbytes(state: Any) -> int:
    """Bytes of all shards of a sharded state dict."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    kinds = (ShardedTensor, ShardedTensorFactory)
    return sum(each.data.nbytes for each in nested_values(state) if isinstance(each, kinds))
