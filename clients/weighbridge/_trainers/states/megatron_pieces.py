"""Pieces of a Megatron-core parameter: the places of the elements of its flat memory in the tensors of a checkpoint.

A parameter is a piece of one tensor; a ``ShardedTensorFactory`` divides it into several pieces, for example the two
halves of a gated linear unit. The state of optimizers for a parameter, or for any range of its elements, lies in pieces
of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from weighbridge._core.boxes import Box
from weighbridge._formats.flat_ranges import RangePart, StridedView, parts_of_range
from weighbridge._formats.megatron_state import ShardedEntry, built_shards
from weighbridge.errors import LayoutError


class Piece(NamedTuple):
    """Elements of a parameter that are a box of one tensor.

    Attributes:
        key: name of the tensor in a checkpoint.
        shape: shape of the tensor.
        offset: first element of the box. The first axes are prepended ones (the layer, the expert), along which the
            extent of the box is 1.
        view: the other axes of the box, as a view of the parameter's memory.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: StridedView

    def parts(self, first: int, size: int) -> Iterator[tuple[Box, RangePart]]:
        """Yield the boxes of the tensor that a range of the parameter's elements holds, each with the part of the
        range.

        Args:
            first: begin of the range in the parameter.
            size: number of elements in the range.
        """
        prepended = len(self.offset) - len(self.view.shape)
        leading, origin = self.offset[:prepended], self.offset[prepended:]
        for part in parts_of_range(first, size, self.view):
            box = part.box
            moved = Box(tuple([o + p for o, p in zip(box.offset, origin, strict=True)]), box.extent)
            yield moved.under(leading), part


def pieces_of(entry: ShardedEntry) -> list[Piece]:
    """Return the pieces of a parameter.

    Raises:
        LayoutError: the parameter is not dense, or its factory does anything other than placing elements at regular
            distances.
    """
    whole = entry.declared.data
    if not whole.is_contiguous():
        raise LayoutError(f"{entry.declared.key} is not a dense tensor")
    if entry.aliases:
        return [
            _piece(
                shard,
                StridedView(tuple(data.shape), data.stride(), data.storage_offset() - whole.storage_offset()),
            )
            for shard in entry.shards
            for data in (shard.data,)
        ]
    return [_piece(shard, view) for shard, view in _traced(entry.declared)]


def _piece(shard: Any, view: StridedView) -> Piece:
    return Piece(shard.key, tuple(map(int, shard.global_shape)), tuple(map(int, shard.global_offset)), view)


def _traced(factory: Any) -> Iterator[tuple[Any, StridedView]]:
    """Yield the shards that a copying factory builds, each with its view of the parameter. The views are found by
    building from the indexes of the parameter's elements."""
    import torch

    indexes = torch.arange(factory.data.numel(), device="cpu").view(factory.data.shape)
    for shard in built_shards(factory, replace(factory, data=indexes).build()):
        found = shard.data
        start = int(found.reshape(-1)[0])
        strides = []
        expected = torch.tensor(start, device="cpu")
        for axis, size in enumerate(found.shape):
            stride = int(found.select(axis, min(1, size - 1)).reshape(-1)[0]) - start
            along = (torch.arange(size, device="cpu") * stride).view(
                [-1 if each == axis else 1 for each in range(found.dim())]
            )
            expected = expected + along
            strides.append(stride)
        if not torch.equal(expected.expand_as(found), found):
            raise LayoutError(f"the factory of {factory.key} does more than place the elements of a parameter evenly")
        yield shard, StridedView(tuple(found.shape), tuple(strides), start)
