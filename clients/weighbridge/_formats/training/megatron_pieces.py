"""Pieces of a Megatron-core parameter: where the elements of its flat memory lie in the tensors of a checkpoint.

A parameter is a piece of one tensor; a ``ShardedTensorFactory`` makes several of it, as of the two halves of a gated linear unit. What
optimizers keep of a parameter lies in pieces of the same kind, whatever range of its elements they keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from weighbridge._core.boxes import Box
from weighbridge._formats.flat_ranges import StridedView, boxes_of_range
from weighbridge._formats.megatron_state import is_main, sharded_entries
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch


class Piece(NamedTuple):
    """Elements of a parameter that are a box of one tensor.

    Attributes:
        key: name of the tensor in a checkpoint.
        shape: the tensor's.
        offset: where the box begins; the first axes are prepended ones (the layer, the expert), along which it extends by 1.
        view: the other axes of the box, as a view of the parameter's memory.
        main: whether it is the main replica.
        resizable: whether the tensor's shape may differ from job to job, as that of a padded vocabulary does.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: StridedView
    main: bool
    resizable: bool

    def boxes(self, flat: torch.Tensor, first: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of the tensor that a range of the parameter's elements holds, and for each a tensor without the prepended axes.

        Args:
            flat: the elements from ``first`` on, dense, of one axis.
            first: where it begins in the parameter.
        """
        prepended = len(self.offset) - len(self.view.shape)
        leading, origin = self.offset[:prepended], self.offset[prepended:]
        for box, tensor in boxes_of_range(flat, first, self.view):
            moved = Box(tuple([o + p for o, p in zip(box.offset, origin, strict=True)]), box.extent)
            yield moved.under(leading), tensor


def pieces_of(entry: Any, replica_id: Any) -> list[Piece]:
    """The pieces of a parameter.

    Args:
        entry: its ``ShardedTensor`` or ``ShardedTensorFactory``, whose ``data`` is the parameter, dense.
        replica_id: in the place of the entry's own.

    Raises:
        LayoutError: a factory does anything but place elements evenly.
    """
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(entry, ShardedTensor):
        return [_piece(replace(entry, replica_id=replica_id), StridedView.dense(entry.local_shape))]
    # views have strides on the meta device as well, where they take no memory
    stand_in = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    built = _build(entry, stand_in, replica_id)
    memory = stand_in.untyped_storage()._cdata
    if all(shard.data.untyped_storage()._cdata == memory for shard in built):
        return [
            _piece(
                shard, StridedView(tuple(shard.data.shape), shard.data.stride(), shard.data.storage_offset())
            )
            for shard in built
        ]
    indexes = torch.arange(entry.data.numel()).view(entry.data.shape)
    return [_piece(shard, _traced(shard)) for shard in _build(entry, indexes, replica_id)]


def _build(entry: Any, data: torch.Tensor, replica_id: Any) -> list[Any]:
    """What a factory makes of other data."""
    return list(sharded_entries(replace(entry, data=data, replica_id=replica_id).build(), entry.key))


def _piece(shard: Any, view: StridedView) -> Piece:
    return Piece(
        shard.key,
        tuple(map(int, shard.global_shape)),
        tuple(map(int, shard.global_offset)),
        view,
        is_main(shard.replica_id),
        bool(shard.allow_shape_mismatch),
    )


def _traced(shard: Any) -> StridedView:
    """The view that a factory has copied, which was given the elements' indexes."""
    import torch

    found = shard.data
    start = int(found.reshape(-1)[0])
    strides = tuple(
        [
            int(found.select(axis, min(1, size - 1)).reshape(-1)[0]) - start
            for axis, size in enumerate(found.shape)
        ]
    )
    expected = torch.full((), start)
    for axis, (size, stride) in enumerate(zip(found.shape, strides, strict=True)):
        along = torch.arange(size) * stride
        expected = expected + along.view([-1 if each == axis else 1 for each in range(found.dim())])
    if not torch.equal(expected.expand_as(found), found):
        raise LayoutError(
            f"the factory of {shard.key} does more than to place the elements of a parameter evenly"
        )
    return StridedView(tuple(found.shape), strides, start)
