"""Reads of a file by pread: of strided bytes into memory, and of files that must not change while they are read.

Where a page of a mapping cannot be read, because the disk reports an error or the file is truncated, SIGBUS ends the
process. A failed pread raises an error in the call that requested the bytes.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weighbridge.errors import DataLoss, FailedPrecondition

Bytes = NDArray[np.uint8]
Took = Callable[[int, Bytes], None]
"""Called with each run of the file that was read: its offset in the file, and its bytes."""

STEP_BYTES = 4 << 20
"""Bytes of one call: few enough to stay in the processor's cache for their next use."""
_MOST_READ = 4
"""A strided part of a file is read as one run, and its bytes are picked out in memory, if the run has at most so many
times its bytes;
"""
_SHORT_GAP = 32 << 10
"""or if its gaps are no longer than this: a further call takes as long as reading so much, and slices of columns need
one for each row.
"""


def _nothing(_offset: int, _run: Bytes) -> None:
    """Ignore the runs."""


def read_into(descriptor: int, target: Bytes, offset: int, strides: tuple[int, ...], took: Took = _nothing) -> None:
    """Fill an array with bytes of a file.

    Args:
        descriptor: descriptor of the file.
        target: array to fill, of any shape and strides.
        offset: offset of the first byte in the file.
        strides: distances in the file, one for each axis of ``target``; not negative.
        took: called with each run that was read.

    Raises:
        EOFError: the file ends before these bytes do.
        OSError: they cannot be read.
    """
    if not target.size:
        return
    axes = [axis for axis, extent in enumerate(target.shape) if extent > 1]
    shape = tuple(target.shape[axis] for axis in axes)
    in_file = tuple(strides[axis] for axis in axes)
    in_target = tuple(target.strides[axis] for axis in axes)
    dense = _row_major(shape)
    if in_file == in_target == dense:
        _read_run(descriptor, target.reshape(-1), offset, took)
        return
    spans = [(extent - 1) * stride for extent, stride in zip(shape, in_file, strict=True)]
    span = sum(spans) + 1
    if span <= STEP_BYTES and _is_read_as_one(shape, in_file, span):
        run = np.empty(span, np.uint8)
        _read_run(descriptor, run, offset, took)
        np.copyto(target, np.ndarray(target.shape, np.uint8, run, 0, strides))
        return
    axis = axes[spans.index(max(spans))]
    middle = target.shape[axis] // 2
    first, second = np.split(target, [middle], axis)
    read_into(descriptor, first, offset, strides, took)
    read_into(descriptor, second, offset + middle * strides[axis], strides, took)


class OpenFile:
    """A file that is open for reading, as an array of bytes: slices are read from the file.

    Args:
        path: path of the file, for errors.
        descriptor: descriptor of the regular file, open for reading; it is closed with this object.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        self._size, self._written_ns = found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Bytes:
        start, stop, _ = part.indices(self._size)
        found = np.empty(max(stop - start, 0), np.uint8)
        self.read_into(found, start, (1,))
        return found

    @property
    def data(self) -> OpenFile:
        """The file itself, in place of an array's ``data``."""
        return self

    def read_into(self, target: Bytes, offset: int, strides: tuple[int, ...]) -> None:
        """Fill an array with bytes of the file; see the function of this name.

        Raises:
            FailedPrecondition: the file was written or truncated since it was opened.
            DataLoss: the bytes cannot be read.
        """
        try:
            read_into(self._descriptor, target, offset, strides)
            now = os.fstat(self._descriptor)
        except EOFError as error:
            raise self._changed() from error
        except OSError as error:
            raise DataLoss(f"{self._path} cannot be read: {error.strerror}", fix="check the disk") from error
        if (now.st_size, now.st_mtime_ns) != (self._size, self._written_ns):
            raise self._changed()

    def _changed(self) -> FailedPrecondition:
        return FailedPrecondition(
            f"{self._path} changed while it was read", fix="read it again once its writer has finished"
        )


def _read_run(descriptor: int, target: Bytes, offset: int, took: Took) -> None:
    for start in range(0, len(target), STEP_BYTES):
        part = target[start : start + STEP_BYTES]
        done = 0
        while done < len(part):
            count = os.preadv(descriptor, [part[done:].data], offset + start + done)
            if not count:
                raise EOFError(f"the file ends at byte {offset + start + done}")
            done += count
        took(offset + start, part)


def _is_read_as_one(shape: tuple[int, ...], strides: tuple[int, ...], span: int) -> bool:
    """Whether to read the gaps between the bytes too, and all in one run."""
    size = math.prod(shape)
    run = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != run:
            break
        run *= extent
    return span <= _MOST_READ * size or span - size <= _SHORT_GAP * (size // run)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))
