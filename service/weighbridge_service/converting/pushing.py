"""Pushing a torch_dist checkpoint, as if a trainer of one rank held what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions
from weighbridge._clients.trainer import TrainerClient
from weighbridge._core.layouts import Layout, Placement, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import safetensors_files
from weighbridge._formats.push_sources import MappedSource
from weighbridge._formats.torch_dist.folder import read_torch_dist
from weighbridge_service.converting.checkpoint_model import (
    checkpoint_model,
    in_dtype_of,
    model_part,
    side_files_of,
)


@dataclass(frozen=True)
class CheckpointToPush:
    """A checkpoint with all that a model needs to be registered.

    Attributes:
        folder: where it lies.
        side_files: the model's files besides its weights.
        tensors: the model's tensors in Hugging Face's space, in the dtypes of the checkpoint.
        layout: the checkpoint's weights.
        left_out: how many entries are no weights, by kind.
    """

    folder: Path
    side_files: Mapping[str, bytes] = field(repr=False)
    tensors: Sequence[TensorSpec] = field(repr=False)
    layout: Layout = field(repr=False)
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
        layout, left_out = model_part(read_torch_dist(folder))
        side_files = side_files_of(folder, config)
        tensors, _ = checkpoint_model(side_files["config.json"], layout)
        specs = tuple(tensors.values())
        return CheckpointToPush(folder, in_dtype_of(specs, side_files), specs, layout, left_out)

    def push(
        self, client: TrainerClient, model: str, *, step: int, run: str, **options: Unpack[PushOptions]
    ) -> PushHandle:
        """Register the model and push the weights as a new version, from where they lie. ``options`` are as for `TrainerClient.push`.

        Raises:
            LayoutError: a tensor is missing, or there twice; names it.
            FailedPrecondition: the model is registered already, with other tensors.
        """
        client.register_files(model, self.side_files, tensors=self.tensors)
        placements = self.layout.placements
        names = dict.fromkeys(placement.buffer for placement in placements)
        files = {name: safetensors_files.map_file(self.folder / name) for name in names}
        mapped = MappedSource.opener(placements, files)
        return client.push_shards(
            model, _stream(self.layout.tensors, placements), TensorSpace.MEGATRON, mapped, step=step, rank=0,
            world_size=1, run=run, request_id=str(uuid.uuid4()), **options,
        )  # fmt: skip


def _stream(tensors: Mapping[str, TensorSpec], placements: Sequence[Placement]) -> Layout:
    return Layout.stream(tensors.values(), [placement.shard for placement in placements])
