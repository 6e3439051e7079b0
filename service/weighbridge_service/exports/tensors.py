"""Tensors of an open version, in sequence, with read-ahead."""

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
    """A function that yields whole tensors with their names, in the order of its argument.

    The tensors share the memory of the version's bytes.
    """
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
    """Steps of at most `STEP_BYTES` through whole tensors in sequence, for reading ahead."""
    position = 0
    for placement in wanted:
        for start in range(0, placement.nbytes, STEP_BYTES):
            length = min(STEP_BYTES, placement.nbytes - start)
            position += length
            copy = ByteCopy((length,), start, (1,), placement.buffer, placement.offset + start, (1,))
            yield ReadStep(position, [copy])


def _tensor(spec: TensorSpec, data: Bytes) -> torch.Tensor:
    """A tensor that shares the memory of ``data``.

    It is valid only while that memory is kept, and must not be written to.
    """
    import torch

    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype.torch)
    if data.flags.writeable:
        return torch.frombuffer(data, dtype=spec.dtype.torch).reshape(spec.shape)
    # by address, because torch would warn about read-only memory, which it does not support
    there = (ctypes.c_ubyte * spec.nbytes).from_address(data.ctypes.data)
    return torch.frombuffer(there, dtype=spec.dtype.torch).reshape(spec.shape)
