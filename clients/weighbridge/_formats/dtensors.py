"""Boxes of a DTensor on this rank, and the local tensors with their elements.

Placements are applied from left to right, each to the result of the previous ones, and cut an axis like `torch.chunk`:
the last ranks get fewer elements, or none. ``_StridedShard``, FSDP2's over an axis that tensor parallelism cuts too,
cuts the axis into pieces first and takes its part of each. Source of the conventions:
``torch.distributed.tensor.placement_types`` of torch 2.13.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from weighbridge._core.boxes import Box
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch


class Cut(NamedTuple):
    """A cut of an axis over the ranks along one axis of a mesh.

    Attributes:
        ranks: number of ranks.
        rank: this rank, from 0.
        pieces: number of pieces into which the axis is cut first, each of which is then cut over the ranks; 1 except
            for a ``_StridedShard``.
    """

    ranks: int
    rank: int
    pieces: int = 1


@functools.lru_cache(maxsize=4096)  # layers are cut in the same way
def runs_after(length: int, cuts: tuple[Cut, ...]) -> tuple[tuple[int, int], ...]:
    """Runs of indexes of an axis that remain after the cuts are applied in order: the first index of each and one past
    its last, in order.

    The work depends on the number of pieces, not on the length, because a file may claim any length.
    """
    left = [(0, length)] if length else []
    for cut in cuts:
        left = _joined(_between(left, _parts(sum(stop - start for start, stop in left), cut)))
    return tuple(left)


def _parts(length: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """Parts of ``length`` indexes that a cut leaves to the rank, in order."""
    size = -(-length // cut.pieces)
    for begin in range(0, length, size or 1):
        end = min(begin + size, length)
        part = -(-(end - begin) // cut.ranks)
        first = min(begin + cut.rank * part, end)
        yield first, min(first + part, end)


def _between(runs: Iterable[tuple[int, int]], parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Intersections of runs with parts, which are positions in all runs together; both are in order."""
    at, left = 0, iter(runs)
    start, stop = next(left, (0, 0))
    for first, last in parts:
        while first < last:
            if first >= at + stop - start:
                at += stop - start
                start, stop = next(left)
                continue
            end = min(last, at + stop - start)
            yield start + first - at, start + end - at
            first = end


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def local_shards(tensor: Any) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor on this rank, and for each a tensor of its extent that aliases the local one.

    Args:
        tensor: a DTensor, or any other tensor, which is on this rank as a whole.

    Returns:
        An empty result for a rank without elements. Several boxes if runs of an axis are not adjacent in the whole
        tensor.

    Raises:
        LayoutError: the tensor waits for a reduction, is placed in an unknown way, or its local tensor contradicts its
            placements.
    """
    local = local_tensor(tensor)
    if not _is_dtensor(tensor):
        return [(Box.whole(tuple(local.shape)), local)] if local.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # it is on other ranks
        return []
    cuts = cuts_of(tensor.placements, tensor.device_mesh.shape, coordinate, tensor.dim())
    runs = [runs_after(length, each) for length, each in zip(tensor.shape, cuts, strict=True)]
    shape = [sum(stop - start for start, stop in of_axis) for of_axis in runs]
    if shape != list(local.shape):
        raise LayoutError(
            f"its local tensor is {list(local.shape)}, but its placements {tensor.placements} imply {shape}"
        )
    return [(box, local[where]) for box, where in boxes_of(runs)]


def cuts_of(
    placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int], axes: int
) -> list[tuple[Cut, ...]]:
    """For each axis of a tensor the cuts that a DTensor's placements make.

    Args:
        placements: one for each axis of the mesh.
        mesh: its shape.
        coordinate: coordinate of this rank in it.
        axes: axes of the tensor.

    Raises:
        LayoutError: a placement is neither ``Shard`` nor ``Replicate``.
    """
    cuts: list[list[Cut]] = [[] for _ in range(axes)]
    for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise LayoutError(f"it is {placement!r}: its parts have not been reduced; redistribute it first")
        if not hasattr(placement, "dim"):
            raise LayoutError(f"its placement {placement!r} is not supported; redistribute it to Shard or Replicate")
        cuts[placement.dim].append(Cut(ranks, rank, int(getattr(placement, "split_factor", 1))))
    return [tuple(of_axis) for of_axis in cuts]


def boxes_of(runs: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Box, tuple[slice, ...]]]:
    """All boxes that are formed by runs on each axis, with their positions in the local tensor."""
    axes = []
    for of_axis in runs:
        ends = itertools.accumulate(stop - start for start, stop in of_axis)
        axes.append(
            [(start, stop, slice(end - stop + start, end)) for (start, stop), end in zip(of_axis, ends, strict=True)]
        )
    return [
        (
            Box(tuple(start for start, _, _ in corner), tuple(stop - start for start, stop, _ in corner)),
            tuple(where for _, _, where in corner),
        )
        for corner in itertools.product(*axes)
    ]


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, or any other tensor itself, detached, after waiting for the collective that
    produces it.
    """
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return cast("torch.Tensor", tensor).detach()
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor
    api = sys.modules.get("torch.distributed._functional_collectives")
    if api is not None and isinstance(local, api.AsyncCollectiveTensor):
        local = local.wait()
    return local.detach()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # only a process that has imported the module can have a DTensor, and the import takes half a second
    api = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(tensor, api.DTensor)


def cut_alike(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor with the same sharding as another one, and other elements.

    Args:
        whole: all elements, in the global shape.
        like: the other DTensor.
    """
    import torch
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(like.to_local(), dtype=whole.dtype)
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    for box, part in local_shards(made):
        part.copy_(whole[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))])
    return made
