"""Layouts: boxes of tensors, and their places in buffers.

The shards of a trainer rank, a folder of safetensors files and the slices for an engine all have this type. Every shard
is stored dense and row-major at a byte offset of a named buffer. The shards of a rank, and the slices of a pull, follow
each other in one buffer, the **stream**, whose name is the empty string. The shards of a Hugging Face folder are in
buffers that are named after its files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from weighbridge._core.boxes import Box, Link
from weighbridge._core.dtypes import DType
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "Placement", "Shard", "TensorSpec"]

STREAM = ""
MAX_RANK = 8
"""Maximum number of axes of a tensor.

The known weight with the most axes, a convolution over video patches, has five.
"""
MAX_NAME_LENGTH = 512
MAX_TENSORS = 500_000
"""Maximum number of tensors of a model. The known model with the most tensors has 70,000."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and global shape of a tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Shard(NamedTuple):
    """One box of one tensor.

    Attributes:
        tensor: name of the tensor.
        box: box of the tensor, in elements of the global tensor.
        main: whether this is the main replica. Of all shards with the same box exactly one is the main replica
            (Megatron's ``replica_id`` is all zeros); the others hold the same bytes.
    """

    tensor: str
    box: Box
    main: bool = True


class Placement(NamedTuple):
    """Place of a shard, which is stored dense and row-major from byte `offset` of `buffer`."""

    shard: Shard
    buffer: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Tensors, and the places of their shards.

    Attributes:
        tensors: all tensors that occur, by name.
        placements: the shards in order.
    """

    tensors: Mapping[str, TensorSpec]
    placements: tuple[Placement, ...] = field(repr=False)

    @staticmethod
    def stream(specs: Iterable[TensorSpec], shards: Sequence[Shard]) -> Layout:
        """Return the layout in which ``shards`` follow each other in one stream.

        Raises:
            LayoutError: a shard names a tensor that is not in ``specs``, or does not fit into it; or two specs have the
                same name and differ.
        """
        tensors: dict[str, TensorSpec] = {}
        for spec in specs:
            if tensors.setdefault(spec.name, spec) != spec:
                raise LayoutError(f"two tensors are called {spec.name}: {tensors[spec.name]} and {spec}")
        placements = []
        offset = 0
        for shard in shards:
            found = tensors.get(shard.tensor)
            if found is None:
                raise LayoutError(f"a shard belongs to {shard.tensor[:200]!r}, which the layout does not list")
            if not shard.box.fits(found.shape):
                raise LayoutError(
                    f"a box with offset {list(shard.box.offset)[:MAX_RANK]} and extent "
                    f"{list(shard.box.extent)[:MAX_RANK]} does not fit into {found}",
                    fix="name one offset and one extent for each axis, in elements, whose sums are within the shape",
                )
            nbytes = shard.box.volume * found.dtype.itemsize
            placements.append(Placement(shard, STREAM, offset, nbytes))
            offset += nbytes
        return Layout(MappingProxyType(tensors), tuple(placements))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all shards together; the length of the stream, if the layout is one."""
        return sum(p.nbytes for p in self.placements)

    @cached_property
    def torch_dtypes(self) -> tuple[torch.dtype, ...]:
        """The torch dtype of each shard's elements (imports torch)."""
        by_tensor = {name: spec.dtype.torch for name, spec in self.tensors.items()}
        return tuple(by_tensor[placement.shard.tensor] for placement in self.placements)

    @cached_property
    def by_tensor(self) -> Mapping[str, tuple[int, ...]]:
        """The indexes in `placements` for each tensor."""
        found: dict[str, list[int]] = {}
        for index, placement in enumerate(self.placements):
            found.setdefault(placement.shard.tensor, []).append(index)
        return {name: tuple(indexes) for name, indexes in found.items()}

    @cached_property
    def digest(self) -> str:
        """Digest of the content: SHA-256, as 64 hex digits, of a canonical JSON text.

        The text is ``[[name, dtype, shape] ... sorted by name], [[name, offset, extent, main, buffer, byte offset]
        ... in order]``, without spaces.
        """
        tensors = [[t.name, t.dtype.name, t.shape] for _, t in sorted(self.tensors.items())]
        shards = [
            [p.shard.tensor, p.shard.box.offset, p.shard.box.extent, p.shard.main, p.buffer, p.offset]
            for p in self.placements
        ]
        text = json.dumps([tensors, shards], separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def _is_stream(self) -> bool:
        offset = 0
        for placement in self.placements:
            if (placement.buffer, placement.offset) != (STREAM, offset):
                return False
            offset += placement.nbytes
        return len(self.by_tensor) == len(self.tensors)

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """Return the layout of the tensors that have an entry in ``names``, under their new names and at the same
        places.
        """
        return Layout(
            MappingProxyType({new: replace(self.tensors[old], name=new) for old, new in names.items()}),
            tuple(
                p._replace(shard=p.shard._replace(tensor=names[p.shard.tensor]))
                for p in self.placements
                if p.shard.tensor in names
            ),
        )

    def without(self, names: Collection[str]) -> Layout:
        """Return the layout without the tensors with these names."""
        return self.renamed({name: name for name in self.tensors if name not in names})

    def select(self, indexes: Sequence[int]) -> Layout:
        """Return the stream of only these shards, in this order; this layout itself, if it is already that stream."""
        if self._is_stream and list(indexes) == list(range(len(self.placements))):
            return self
        tensors: dict[str, TensorSpec] = {}
        placements = []
        offset = 0
        for index in indexes:
            shard, _, _, nbytes = self.placements[index]
            tensors[shard.tensor] = self.tensors[shard.tensor]
            placements.append(Placement(shard, STREAM, offset, nbytes))
            offset += nbytes
        return Layout(MappingProxyType(tensors), tuple(placements))


@dataclass(frozen=True)
class WeightLinks:
    """Links from a trainer's tensors to the tensors of a model.

    Attributes:
        sources: the trainer's tensors that belong to the model.
        targets: the model's tensors, by Hugging Face's names, that contain elements of the sources.
        links: boxes of sources, and the boxes of targets with the same elements.
    """

    sources: Mapping[str, TensorSpec]
    targets: Mapping[str, TensorSpec]
    links: tuple[Link, ...] = field(repr=False)


def adapter_digest(config_json: bytes, tensors: Iterable[TensorSpec]) -> str:
    """Return the digest that identifies an adapter, as 64 hex digits: SHA-256 of its ``adapter_config.json`` and the
    digest of its tensors.

    Args:
        config_json: content of ``adapter_config.json``.
        tensors: the adapter's tensors, in any order.
    """
    return hashlib.sha256(config_json + Layout.stream(tensors, ()).digest.encode()).hexdigest()


def check_spec(spec: TensorSpec) -> None:
    """Refuse a tensor whose name or shape cannot belong to a model, because tensors that are received over the network
    are not trusted.

    Raises:
        LayoutError: the tensor breaks a rule (names it).
    """
    if not spec.name or len(spec.name) > MAX_NAME_LENGTH or not spec.name.isprintable():
        raise LayoutError(
            f"tensor name {spec.name[:80]!r} is empty, longer than {MAX_NAME_LENGTH} characters, or not printable"
        )
    if len(spec.shape) > MAX_RANK:
        raise LayoutError(f"{spec.name} has {len(spec.shape)} axes, more than {MAX_RANK}")
    if any(n < 0 for n in spec.shape):
        raise LayoutError(f"{spec.name} has a negative extent in its shape {list(spec.shape)}")
    if spec.nbytes >= 1 << 50:
        raise LayoutError(f"{spec} would be larger than a pebibyte")
