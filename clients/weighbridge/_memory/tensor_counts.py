"""Counts of non-finite elements of tensors on their own device, by torch.

One reduction of each tensor shows whether all of its elements are finite, which they nearly always are. The host does
not wait until the counts are requested, and no temporary of a tensor's size is made. Only tensors with non-finite
elements are counted.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.nonfinite import Encoding

if TYPE_CHECKING:
    import torch

_AT_ONCE = 16 << 20
_FLOATS = {
    0x7C00: "float16",
    0x7F80: "bfloat16",
    0x7F80_0000: "float32",
    0x7FF0_0000_0000_0000: "float64",
}
"""Names of the dtypes that torch compares as numbers, by their masks."""


class Screen:
    """Reductions of tensors, which may be freed before it is known which of them have non-finite elements."""

    def __init__(self) -> None:
        self._screened: list[_Screened] = []

    def add(self, index: int, flat: torch.Tensor, copies: Sequence[ByteCopy[int]], encoding: Encoding | None) -> None:
        """Begin to reduce, on the current stream of the tensor's device; arguments as for `TensorCounts.add`."""
        if encoding is not None and flat.numel():
            self._screened.append(_screened(index, flat, copies, encoding))

    def suspects(self) -> list[tuple[int, Sequence[ByteCopy[int]], Encoding]]:
        """Wait for the reductions. Returns the arguments of `add` of the tensors that may have non-finite elements."""
        screened, self._screened = self._screened, []
        return [(each.index, each.copies, each.encoding) for each in _not_cleared(screened)]


class TensorCounts:
    """Counts of non-finite elements that copies take out of tensors.

    Added tensors must not change until `take` returns.

    Args:
        at_once: most patterns that are counted at a time.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._at_once = at_once
        self._added: dict[_Screened, torch.Tensor] = {}
        self._waiting: list[_Added] = []
        self._norms: list[tuple[list[_Added], torch.Tensor]] = []

    def add(self, index: int, flat: torch.Tensor, copies: Sequence[ByteCopy[int]], encoding: Encoding | None) -> None:
        """Begin to count, on the current stream of the tensor's device.

        Args:
            index: identifies the count.
            flat: elements of the encoding's dtype in one dimension, contiguous.
            copies: copies of the bytes that count, as often as they are copied; whole elements.
            encoding: None if there is nothing to count.
        """
        if encoding is None or not flat.numel():
            return
        if encoding.itemsize > 1 and _reduces_many(flat.device):
            self._waiting.append(_Added(index, flat, copies, encoding))
        else:
            self._added[_screened(index, flat, copies, encoding)] = flat

    def begin(self) -> None:
        """Reduce the tensors added so far that can be reduced many at a time, on the current streams of their
        devices.
        """
        import torch

        alike: dict[object, list[_Added]] = defaultdict(list)
        for each in self._waiting:
            alike[each.flat.device, each.encoding.mask].append(each)
        self._waiting = []
        for group in alike.values():
            dtype = getattr(torch, _FLOATS[group[0].encoding.mask])
            norms = torch._foreach_norm([_of_dtype(each.flat, dtype) for each in group], math.inf)
            self._norms.append((group, torch.stack(norms)))

    def take(self) -> dict[int, int]:
        """Wait for the counts. Returns those above 0, by index."""
        self.begin()
        added, self._added = self._added, {}
        norms, self._norms = self._norms, []
        found = {each.index: each.count(added[each], self._at_once) for each in _not_cleared(added)}
        for group, largest in norms:
            for each, norm in zip(group, largest.tolist(), strict=True):
                if not math.isfinite(norm):
                    found[each.number] = _count_all(each.flat, each.copies, each.encoding, self._at_once)
        return {index: count for index, count in found.items() if count}


class _Added(NamedTuple):
    """A tensor that is counted."""

    number: int
    flat: torch.Tensor
    copies: Sequence[ByteCopy[int]]
    encoding: Encoding


@dataclass(frozen=True, slots=True, eq=False)
class _Screened:
    """A tensor's extremes, and the arguments to count it. The extremes are the smallest and the largest element, which
    are NaN if any element is; for bytes, the largest signed and unsigned one."""

    index: int
    copies: Sequence[ByteCopy[int]]
    encoding: Encoding
    extremes: torch.Tensor

    def count(self, flat: torch.Tensor, at_once: int) -> int:
        """Count all elements of the tensor, so many at a time."""
        return _count_all(flat, self.copies, self.encoding, at_once)


def _count_all(flat: torch.Tensor, copies: Sequence[ByteCopy[int]], encoding: Encoding, at_once: int) -> int:
    bits = _bits(flat)
    return sum(_count(_patterns(bits, copy, encoding), encoding, at_once) for copy in copies)


@functools.cache
def _reduces_many(device: torch.device) -> bool:
    """Whether torch can reduce many tensors of a device at a time, which takes a GPU as long as one, and detects NaN
    and infinities.
    """
    import torch

    if device.type != "cuda":
        return False
    tried = [torch.tensor([1.0, value], device=device) for value in (math.nan, math.inf, 2.0)]
    try:
        found = [float(norm) for norm in torch._foreach_norm(tried, math.inf)]
    except (AttributeError, RuntimeError):  # a private function of torch, which may be missing
        return False
    return [math.isfinite(each) for each in found] == [False, False, True]


def _screened(index: int, flat: torch.Tensor, copies: Sequence[ByteCopy[int]], encoding: Encoding) -> _Screened:
    return _Screened(index, copies, encoding, _extremes(_bits(flat), encoding))


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach().resolve_conj().resolve_neg()


def _of_dtype(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements with a floating-point dtype; the tensor itself, if it has the dtype and no pending negation."""
    return flat if flat.dtype == dtype and not flat.is_neg() else _bits(flat).view(dtype)


def _extremes(flat: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    import torch

    if encoding.itemsize == 1:
        return torch.stack([flat.view(torch.int8).amax().short(), flat.view(torch.uint8).amax().short()])
    return torch.stack(torch.aminmax(flat.view(getattr(torch, _FLOATS[encoding.mask]))))


def _not_cleared(screened: Iterable[_Screened]) -> Iterable[_Screened]:
    """Tensors that may have non-finite elements; waits once for each device and dtype."""
    import torch

    alike: dict[object, list[_Screened]] = defaultdict(list)
    for each in screened:
        alike[each.extremes.device, each.extremes.dtype].append(each)
    for group in alike.values():
        extremes = torch.stack([each.extremes for each in group]).tolist()
        yield from (each for each, found in zip(group, extremes, strict=True) if not _cleared(found, each.encoding))


def _cleared(extremes: Sequence[float], encoding: Encoding) -> bool:
    if encoding.itemsize > 1:
        return all(map(math.isfinite, extremes))
    signed, unsigned = extremes
    return unsigned < encoding.sign | encoding.mask and (not encoding.sign or signed < encoding.mask)


def _patterns(flat: torch.Tensor, copy: ByteCopy[int], encoding: Encoding) -> torch.Tensor:
    """The elements that a copy takes of a tensor, as integers of the patterns' size."""
    import torch

    size = encoding.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    extent = (*copy.extent[:-1], copy.extent[-1] // size)
    strides = (*(stride // size for stride in copy.stream_strides[:-1]), 1)
    return flat.view(integers)[copy.stream_offset // size :].as_strided(extent, strides)


def _count(patterns: torch.Tensor, encoding: Encoding, at_once: int) -> int:
    if patterns.numel() > at_once:
        if len(patterns) == 1:
            return _count(patterns[0], encoding, at_once)
        step = _rows_at_once(patterns, encoding, at_once)
        return sum(_count(patterns[at : at + step], encoding, at_once) for at in range(0, len(patterns), step))
    nonfinite = (patterns & encoding.mask) == encoding.mask
    if encoding.width > 1:
        nonfinite = nonfinite.view(*nonfinite.shape[:-1], -1, encoding.width).any(-1)
    return int(nonfinite.sum())


def _rows_at_once(patterns: torch.Tensor, encoding: Encoding, at_once: int) -> int:
    """Number of indexes of the first axis that are counted at a time; whole elements."""
    rows = max(at_once // (patterns.numel() // len(patterns)), 1)
    return max(rows // encoding.width * encoding.width, encoding.width) if patterns.ndim == 1 else rows
