"""Cast of an outgoing stream: converts floating-point tensors to another dtype than the version's, or adds a constant
to their elements.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._formats.shifts import NO_SHIFTS, Shifts, shifted
from weighbridge._transport.pieces import Buffer
from weighbridge.errors import InvalidArgument

ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Suffixes of the names of routers' biases, in models without a weight map. These biases choose among experts whose
scores are close, and trainers change them by steps that narrower dtypes round away.
"""


def keeps_dtype(spec: TensorSpec, dtype: DType, keep_in_fp32: tuple[str, ...]) -> bool:
    """Whether a cast leaves a tensor unchanged because it would narrow the tensor and the tensor's name ends with a
    suffix of ``keep_in_fp32``.
    """
    return dtype.itemsize < spec.dtype.itemsize and spec.name.endswith(keep_in_fp32)


def cast_specs(
    specs: Iterable[TensorSpec],
    dtype: DType,
    keep_in_fp32: tuple[str, ...] = (),
    scales: frozenset[str] = frozenset(),
) -> list[TensorSpec]:
    """Specs of tensors after a cast. Floating-point tensors get the dtype. Other tensors, and tensors for which
    `keeps_dtype` is true, are unchanged.

    Args:
        specs: specs before the cast.
        dtype: dtype to cast to.
        keep_in_fp32: suffixes of names of tensors that are never narrowed, such as the biases of routers.
        scales: names of tensors that are scales of quantised weights.

    Raises:
        InvalidArgument: weights cannot be cast to that dtype, or a tensor cannot be cast (an fp8 tensor is meaningless
            without its scales, and scales in another dtype change the weights).
    """
    if not dtype.is_float:
        raise InvalidArgument(f"weights cannot be cast to {dtype}", fix="cast to bf16, fp16, fp32 or fp64")
    cast = []
    for spec in specs:
        if spec.dtype.name.startswith("F8_"):
            raise InvalidArgument(
                f"{spec} cannot be cast to {dtype}: its values are without their scales",
                fix="take it without a dtype; `weighbridge import --dequantize` makes a version that can be cast",
            )
        if spec.name in scales and spec.dtype != dtype:
            raise InvalidArgument(
                f"{spec} cannot be cast to {dtype}: it scales quantised weights, which would change",
                fix="take the version without a dtype; to have its weights in one, dequantise "
                "them (from_pretrained, model.dequantize(), "
                "save_pretrained) and import that",
            )
        kept = keeps_dtype(spec, dtype, keep_in_fp32)
        cast.append(replace(spec, dtype=dtype) if spec.dtype.is_float and not kept else spec)
    return cast


def _may_overflow(source: DType, target: DType) -> bool:
    """Whether a cast must be checked for finite elements that become infinite.

    From float32 to bfloat16 only the last 2^-9 of the range would overflow, so that cast is not checked.
    """
    return source != target and (target.short == "fp16" or source.short == "fp64")


Gather = Callable[[int, int], Buffer]
"""Reads a range of a stream, by its byte offset and its length in bytes."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring bytes of the stream with the same cast; positions in bytes."""

    start: int
    end: int
    source_start: int
    source: DType
    target: DType
    shift: float


class Casting:
    """A cast of a stream. Rounds as ``torch.Tensor.to`` does.

    Args:
        layout: layout of the stream in the version's own dtypes.
        dtype: dtype of the floating-point tensors after the cast; None to cast none.
        keep_in_fp32: suffixes of names of tensors that are never narrowed.
        scales: names of tensors that are scales of quantised weights, which are not cast.
        shifts: constants that are added to each element of some tensors, by name, in their dtype before the cast.

    Attributes:
        layout: layout of the stream after the cast.

    Raises:
        InvalidArgument: as `cast_specs`.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: DType | None,
        keep_in_fp32: tuple[str, ...] = (),
        scales: frozenset[str] = frozenset(),
        shifts: Shifts = NO_SHIFTS,
    ) -> None:
        specs = list(layout.tensors.values())
        if dtype is not None:
            specs = cast_specs(specs, dtype, keep_in_fp32, scales)
        self.layout = Layout.stream(specs, [placement.shard for placement in layout.placements])
        self._runs: list[_Run] = []
        for before, after in zip(layout.placements, self.layout.placements, strict=True):
            source, target = (
                layout.tensors[before.shard.tensor].dtype,
                self.layout.tensors[after.shard.tensor].dtype,
            )
            end, shift = after.offset + after.nbytes, shifts.get(before.shard.tensor, 0.0)
            last = self._runs[-1] if self._runs else None
            if last is not None and (last.source, last.target, last.shift) == (source, target, shift):
                self._runs[-1] = replace(last, end=end)
            elif after.nbytes:
                self._runs.append(_Run(after.offset, end, before.offset, source, target, shift))
        self._starts = [run.start for run in self._runs]

    def gather(self, gather: Gather, offset: int, length: int) -> Buffer:
        """Read a range of the cast stream, which may begin and end inside of an element.

        Args:
            gather: reads ranges of the stream in the version's own dtypes.
            offset: offset in bytes of the cast stream.
            length: length in bytes of the cast stream.

        Raises:
            InvalidArgument: a finite element would become infinite.
        """
        parts: list[Buffer] = []
        for run in self._runs[max(bisect.bisect_right(self._starts, offset) - 1, 0) :]:
            if run.start >= offset + length:
                break
            begin, end = max(offset, run.start) - run.start, min(offset + length, run.end) - run.start
            if begin < end:
                cast, overflowed = _cast(gather, run, begin, end)
                if overflowed is not None:
                    raise self._beyond(run, overflowed)
                parts.append(cast)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _beyond(self, run: _Run, position: int) -> InvalidArgument:
        """The error for a finite element that would become infinite, ``position`` bytes from the start of a run."""
        placements = self.layout.placements
        index = bisect.bisect_right(placements, run.start + position, key=lambda each: each.offset) - 1
        # an empty shard has the same offset as the next one, so bisect_right finds the shard with the element
        spec = self.layout.tensors[placements[index].shard.tensor]
        return InvalidArgument(
            f"{spec.name} has elements that are too large for {run.target}: they would become infinite",
            fix="take it in bf16 or fp32, or leave the dtype out",
        )


def _cast(gather: Gather, run: _Run, begin: int, end: int) -> tuple[Buffer, int | None]:
    """The bytes ``begin`` to ``end`` of a run. Elements that are only partly in the range are cast as a whole.

    Returns:
        The bytes, and the position in bytes of the first finite element that has become infinite, in the run; None if
        there is none.
    """
    import torch

    if run.source == run.target and not run.shift:
        return gather(run.source_start + begin, end - begin), None
    first, last = begin // run.target.itemsize, -(-end // run.target.itemsize)
    size = run.source.itemsize
    raw = gather(run.source_start + first * size, (last - first) * size)
    if run.shift:
        raw = shifted(raw, run.source, run.shift).data
    elements = torch.empty(last - first, dtype=run.source.torch)  # aligned, unlike a view of a file
    elements.view(torch.uint8).numpy()[:] = np.frombuffer(raw, np.uint8)
    cast = elements.to(run.target.torch)
    overflowed = None
    if _may_overflow(run.source, run.target) and cast.isinf().any():
        broken = cast.isinf() & elements.isfinite()
        if broken.any():
            overflowed = (first + int(broken.to(torch.uint8).argmax())) * run.target.itemsize
    raw_cast = cast.view(torch.uint8).numpy()
    return raw_cast[begin - first * run.target.itemsize :][: end - begin].data, overflowed
