"""Tensors of an open version, one after another, read ahead of whoever takes them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Placement, TensorSpec
from weighbridge_service.plan.transfers import Bytes
from weighbridge_service.pull.read_ahead import STEP_BYTES, ReadAhead, ReadStep
from weighbridge_service.pull.reading import OpenedVersion

if TYPE_CHECKING:
    import torch


def tensors_of(
    opened: OpenedVersion,
) -> Callable[[Sequence[TensorSpec]], Iterable[tuple[str, torch.Tensor]]]:
    """What gives tensors with their names, whole and in the order that is asked for; of each its bytes where they lie."""
    placements = {placement.shard.tensor: placement for placement in opened.files.layout.placements}

    def tensors(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = [placements[spec.name] for spec in specs]
        with contextlib.closing(ReadAhead(opened.sources, _steps(wanted))) as ahead:
            position = 0
            for placement in wanted:
                ahead.advance(position)
                position += placement.nbytes
                there = opened.files.layout.tensors[placement.shard.tensor]
                data = opened.sources[placement.buffer].read(placement.offset, placement.nbytes)
                yield there.name, _tensor(there, data)

    return tensors


def _steps(wanted: Iterable[Placement]) -> Iterator[ReadStep]:
    """Whole tensors one behind the other, for reading ahead."""
    position = 0
    for placement in wanted:
        for start in range(0, placement.nbytes, STEP_BYTES):
            length = min(STEP_BYTES, placement.nbytes - start)
            position += length
            copy = ByteCopy((length,), start, (1,), placement.buffer, placement.offset + start, (1,))
            yield ReadStep(position, [copy])


def _tensor(spec: TensorSpec, data: Bytes) -> torch.Tensor:
    """A tensor over bytes where they lie, as long as whatever they lie in is kept; it must not be written to."""
    import torch

    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype.torch)
    if data.flags.writeable:
        return torch.frombuffer(data, dtype=spec.dtype.torch).reshape(spec.shape)
    # by address: of read-only memory, which torch does not know, it would warn
    there = (ctypes.c_ubyte * spec.nbytes).from_address(data.ctypes.data)
    return torch.frombuffer(there, dtype=spec.dtype.torch).reshape(spec.shape)
