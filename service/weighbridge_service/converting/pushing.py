"""Pushing a checkpoint, as if a trainer of one rank held what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import numpy as np

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions
from weighbridge._clients.trainer import TrainerClient
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import safetensors_files
from weighbridge._formats.push_sources import MappedSource
from weighbridge._memory.file_reads import OpenFile
from weighbridge.errors import DataLoss
from weighbridge_service.converting.checkpoint_model import (
    checkpoint_model,
    in_dtype_of,
    model_part,
    side_files_of,
)
from weighbridge_service.converting.named_model import named_model, read_checkpoint

_COMPARED = 1 << 20
"""Bytes that are compared at once."""


@dataclass(frozen=True)
class CheckpointToPush:
    """A checkpoint with all that a model needs to be registered.

    Attributes:
        folder: where it lies.
        side_files: the model's files besides its weights.
        tensors: the model's tensors in Hugging Face's space, in the dtypes of the checkpoint.
        shards: the checkpoint's weights, in one of the two tensor spaces, each with where its bytes lie.
        declared: the tensors that they are of.
        space: which of the spaces.
        tied: copies of other weights, chunk by chunk, which must be the same.
        left_out: how many entries are no weights, by kind.
    """

    folder: Path
    side_files: Mapping[str, bytes] = field(repr=False)
    tensors: Sequence[TensorSpec] = field(repr=False)
    shards: Sequence[tuple[Shard, Placement]] = field(repr=False)
    declared: Sequence[TensorSpec] = field(repr=False)
    space: TensorSpace
    tied: Sequence[tuple[str, Placement, Placement]] = field(repr=False)
    left_out: Mapping[str, int] = field(repr=False)

    @staticmethod
    def read(folder: Path, config: Path | None) -> CheckpointToPush:
        """Find out what is in a checkpoint, reading no weights and running nothing of it.

        Args:
            folder: the checkpoint.
            config: a Hugging Face folder with the model's config, tokenizer and so on; None to look in the checkpoint.

        Raises:
            NotFound: there is no checkpoint, or no ``config.json``.
            DataLoss: the checkpoint is damaged.
            LayoutError: a tensor is unknown, or has another shape than the model's.
        """
        checkpoint, named = read_checkpoint(folder)
        side_files = side_files_of(folder, config)
        if named:
            model = named_model(side_files["config.json"], checkpoint)
            specs = tuple(model.tensors.values())
            return CheckpointToPush(
                folder, in_dtype_of(specs, side_files), specs, tuple(model.shards()), specs,
                TensorSpace.HUGGING_FACE, model.tied, model.left_out,
            )  # fmt: skip
        layout, left_out = model_part(checkpoint)
        tensors, _ = checkpoint_model(side_files["config.json"], layout)
        specs = tuple(tensors.values())
        return CheckpointToPush(
            folder, in_dtype_of(specs, side_files), specs,
            tuple((place.shard, place) for place in layout.placements), tuple(layout.tensors.values()),
            TensorSpace.MEGATRON, (), left_out,
        )  # fmt: skip

    def push(
        self, client: TrainerClient, model: str, *, step: int, run: str, **options: Unpack[PushOptions]
    ) -> PushHandle:
        """Register the model and push the weights as a new version, from where they lie. ``options`` are as for `TrainerClient.push`.

        Raises:
            LayoutError: a tensor is missing, or there twice; names it.
            FailedPrecondition: the model is registered already, with other tensors.
            DataLoss: a tensor is not the same as the one that it is tied to.
        """
        places = [place for _, place in self.shards]
        compared = (place for _, *both in self.tied for place in both)
        names = dict.fromkeys(place.buffer for place in (*places, *compared))
        files = {name: safetensors_files.map_file(self.folder / name) for name in names}
        _check_tied(self.tied, files)
        client.register_files(model, self.side_files, tensors=self.tensors)
        stream = Layout.stream(self.declared, [shard for shard, _ in self.shards])
        return client.push_shards(
            model, stream, self.space, MappedSource.opener(places, files), step=step, rank=0, world_size=1, run=run,
            request_id=str(uuid.uuid4()), **options,
        )  # fmt: skip


def _check_tied(tied: Sequence[tuple[str, Placement, Placement]], files: Mapping[str, OpenFile]) -> None:
    for name, copy, original in tied:
        for first in range(0, copy.nbytes, _COMPARED):
            last = min(first + _COMPARED, copy.nbytes)
            one, other = (
                files[place.buffer][place.offset + first : place.offset + last] for place in (copy, original)
            )
            if not np.array_equal(one, other):
                raise DataLoss(
                    f"{name} is not the same as {original.shard.tensor}, and config.json ties them",
                    fix="set tie_word_embeddings to false in config.json, or leave one of them out",
                )
