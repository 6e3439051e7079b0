"""Pushes of ranks that hold rows of each tensor, by the trainer's client."""

from __future__ import annotations

import torch

from tests.support.raw_clients import TinyModel, rows_layout
from weighbridge import TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource


def push_rows(trainer: TrainerClient, model: str, source: TinyModel, rank: int, ranks: int, step: int) -> int:
    """Push a rank's rows of all tensors; returns the version's number once it is durable."""
    layout = rows_layout(source.arrays, rank, ranks)
    tensors = []
    for placement in layout.placements:
        shard = placement.shard
        box = tuple(slice(o, o + e) for o, e in zip(shard.box.offset, shard.box.extent, strict=True))
        tensors.append(torch.from_numpy(source.arrays[shard.tensor][box].copy()))
    held = TensorSource(StagingPool(), layout, tensors)
    handle = trainer.push_shards(model, layout, TensorSpace.HUGGING_FACE, held, step=step, rank=rank, world_size=ranks)
    handle.wait(VersionState.DURABLE, timeout=60)
    return handle.number
