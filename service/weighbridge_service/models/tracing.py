"""Trace of a conversion: the place of each element, found by converting numbered elements.

A conversion takes one tensor and returns named tensors. For each axis of the input, the trace runs it on a tensor whose
elements are their own index along that axis. So each output element identifies its source. Two runs that encode the
index differently must decode to the same result. So the trace detects a conversion that scales, shifts or mixes
elements, and raises an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weighbridge._core.boxes import Box, Link
from weighbridge.errors import LayoutError

Conversion = Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]
_SCALE, _SHIFT = 2, 1_000_003
_MOST_PARTS = 8
"""Maximum number of parts into which a target is cut if a source axis runs along two of its axes."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Run of consecutive indexes on both sides."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class _Along:
    """Mapping of a source axis to an axis of a part of the target.

    Attributes:
        within: the part: an index on each of some axes of the target.
        axis: the target axis along which the source axis runs in the part; None if there is none.
        runs: runs of consecutive indexes.
    """

    within: Mapping[int, int]
    axis: int | None
    runs: Sequence[_Run]


def trace(name: str, shape: Sequence[int], conversion: Conversion) -> list[Link]:
    """Links from tensor ``name`` of this shape to the tensors that the conversion returns.

    Uses memory for at most a few int32 tensors of the input's size, because inputs are expanded views.

    Raises:
        LayoutError: the conversion does more than move elements.
    """
    found: dict[str, list[list[_Along]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for axis in range(len(shape)):
        plain = conversion(_index_tensor(shape, axis, 1, 0))
        coded = conversion(_index_tensor(shape, axis, _SCALE, _SHIFT))
        for (target, values), (_, check) in zip(plain, coded, strict=True):
            shapes[target] = tuple(values.shape)
            found.setdefault(target, []).append(list(_along(name, target, shape[axis], values, check)))
    return [link for target, axes in found.items() for link in _links(name, target, shapes[target], axes)]


def _index_tensor(shape: Sequence[int], axis: int, scale: int, shift: int) -> torch.Tensor:
    index = torch.arange(shape[axis], dtype=torch.int32) * scale + shift
    return index.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(tuple(shape))


def _along(
    name: str,
    target: str,
    extent: int,
    values: torch.Tensor,
    check: torch.Tensor,
    within: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[_Along]:
    """Target axis along which one source axis runs, and the runs of consecutive indexes.

    If it runs along two axes, as for interleaved rows, yields one result for each index of the shorter axis.
    """
    varying = [axis for axis in range(values.dim()) if _varies(values, axis)]
    if len(varying) > 1:
        shortest = min(varying, key=lambda axis: values.shape[axis])
        if values.shape[shortest] > _MOST_PARTS:
            raise LayoutError(f"{name} -> {target}: one source axis runs along {len(varying)} target axes")
        for index in range(values.shape[shortest]):
            part, of_check = (tensor.narrow(shortest, index, 1) for tensor in (values, check))
            yield from _along(name, target, extent, part, of_check, {**within, shortest: index})
        return
    vector, coded = _vector(values, varying), _vector(check, varying)
    if not torch.equal(coded, vector * _SCALE + _SHIFT) or bool(((vector < 0) | (vector >= extent)).any()):
        raise LayoutError(f"{name} -> {target}: elements are changed, not only moved")
    if not varying:
        yield _Along(within, None, [_Run(int(vector[0]), 0, 1)])
        return
    breaks = (torch.nonzero(vector[1:] != vector[:-1] + 1).flatten() + 1).tolist()
    bounds = [0, *breaks, len(vector)]
    yield _Along(within, varying[0], [_Run(int(vector[a]), a, b - a) for a, b in itertools.pairwise(bounds)])


def _varies(values: torch.Tensor, axis: int) -> bool:
    if values.shape[axis] == 1 or values.stride(axis) == 0:
        return False
    for other in range(values.dim()):
        if values.stride(other) == 0:
            values = values.narrow(other, 0, 1)
    return not torch.equal(values, values.narrow(axis, 0, 1).expand_as(values))


def _vector(values: torch.Tensor, varying: Sequence[int]) -> torch.Tensor:
    for axis in range(values.dim()):
        if axis not in varying:
            values = values.narrow(axis, 0, 1)
    return values.reshape(-1).to(torch.int64)


def _links(name: str, target: str, shape: tuple[int, ...], axes: Sequence[Sequence[_Along]]) -> Iterator[Link]:
    """Links of each part of the target in which every source axis runs along at most one axis."""
    for of_part in itertools.product(*axes):
        within = {axis: index for along in of_part for axis, index in along.within.items()}
        if all(within[axis] == index for along in of_part for axis, index in along.within.items()):
            yield from _links_of_part(name, target, shape, of_part, within)


def _links_of_part(
    name: str, target: str, shape: tuple[int, ...], axes: Sequence[_Along], within: Mapping[int, int]
) -> Iterator[Link]:
    source_axis_of = {along.axis: source for source, along in enumerate(axes) if along.axis is not None}
    if len(source_axis_of) != sum(along.axis is not None for along in axes) or source_axis_of.keys() & within:
        raise LayoutError(f"{name} -> {target}: two source axes are merged into one")
    if any(n != 1 for axis, n in enumerate(shape) if axis not in source_axis_of and axis not in within):
        raise LayoutError(f"{name} -> {target}: elements are repeated along an axis")
    target_axes = tuple(source_axis_of.get(axis) for axis in range(len(shape)))
    for runs in itertools.product(*(along.runs for along in axes)):
        source_box = Box(tuple(run.source for run in runs), tuple(run.length for run in runs))
        offset, extent = [within.get(axis, 0) for axis in range(len(shape))], [1] * len(shape)
        for axis, source in source_axis_of.items():
            offset[axis], extent[axis] = runs[source].target, runs[source].length
        yield Link(name, source_box, target, Box(tuple(offset), tuple(extent)), target_axes)
