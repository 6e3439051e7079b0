"""Sides of a comparison: versions of a service, and folders on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weighbridge._clients.engine import EngineClient
from weighbridge._core.layouts import Placement, Shard, TensorSpec
from weighbridge._core.references import Reference
from weighbridge._core.slices import Boxes
from weighbridge._formats import safetensors_files
from weighbridge._memory.file_reads import OpenFile


class Side(Protocol):
    """A set of tensors that is compared with another.

    Attributes:
        title: its name, for people.
        specs: its tensors, by name.
        digests: XXH3-128 of tensors by name, as far as they are known.
    """

    @property
    def title(self) -> str: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def digests(self) -> Mapping[str, str]: ...

    def read(self, shards: Sequence[Shard]) -> Iterator[NDArray[np.uint8]]:
        """The bytes of some boxes, in their order, one box at a time.

        A box is a run of its tensor's elements in row-major order.
        """


@dataclass(frozen=True)
class VersionSide:
    """A version, whose tensors are pulled over the local lane or gRPC, as by an engine."""

    title: str
    specs: Mapping[str, TensorSpec] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    client: EngineClient = field(repr=False)
    reference: Reference

    @staticmethod
    def find(client: EngineClient, reference: Reference) -> VersionSide:
        """A version that a number or a ref names now.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: it is not ready.
        """
        planned = client.pull(reference.model, reference.version)
        model, number = planned.version.model, planned.version.number
        digests: Mapping[str, str] = {}
        if planned.version.state.stored:
            digests = client.tensor_digests(model, number)
        return VersionSide(f"{model}@{number}", planned.layout.tensors, digests, client, Reference(model, str(number)))

    def read(self, shards: Sequence[Shard]) -> Iterator[NDArray[np.uint8]]:
        """The bytes of some boxes."""
        import torch

        if not shards:
            return
        boxes = Boxes([(shard.tensor, shard.box.offset, shard.box.extent) for shard in shards])
        for _, tensor in self.client.pull(self.reference.model, self.reference.version, boxes):
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            yield flat.reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class FolderSide:
    """A Hugging Face folder."""

    title: str
    specs: Mapping[str, TensorSpec] = field(repr=False)
    files: Mapping[str, OpenFile] = field(repr=False)
    placements: Mapping[str, Placement] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False, default_factory=dict)

    @staticmethod
    def map(folder: Path) -> FolderSide:
        """Open the tensors of a folder.

        Raises:
            NotFound: the folder contains no safetensors file.
            DataLoss: a file is damaged, or lacks a tensor that the index lists.
            InvalidArgument: the files are not those of one model.
        """
        # by path, so that an error names the side
        found = safetensors_files.read_folder(folder, by_path=True)
        placements = {placement.shard.tensor: placement for placement in found.layout.placements}
        return FolderSide(str(folder), found.layout.tensors, found.buffers, placements)

    def read(self, shards: Sequence[Shard]) -> Iterator[NDArray[np.uint8]]:
        """The bytes of some boxes, as they lie in the files."""
        for shard in shards:
            spec, placement = self.specs[shard.tensor], self.placements[shard.tensor]
            at = _position(spec.shape, shard.box.offset) * spec.dtype.itemsize + placement.offset
            yield self.files[placement.buffer][at : at + shard.box.volume * spec.dtype.itemsize]


def _position(shape: Sequence[int], offset: Sequence[int]) -> int:
    """Number of elements before an offset, in row-major order."""
    return sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(offset))
