"""Strided copies within host memory by the C extension, a whole plan in one call without the interpreter's lock.

torch takes some microseconds for each copy, and reads the target's lines before it writes them; the extension streams past the caches.
It counts non-finite elements while they are in registers on their way. Without it, torch and numpy do the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.nonfinite import Encoding

log = logging.getLogger(__name__)

Plan = NDArray[np.int64]
"""Copies of one shard, packed: for each its memory, offset there, offset in the shard, number of axes, and for each axis the extent,
the stride in memory and the stride in the shard."""


class Region(NamedTuple):
    """Bytes that the caller keeps where they are."""

    address: int
    nbytes: int


def region_of(array: NDArray[np.uint8], *, written: bool) -> Region:
    """Where the bytes of an array lie.

    Raises:
        ValueError: they lie apart, or are to be written and may not be.
    """
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        raise ValueError("the array is not contiguous, or is read-only and would be written to")
    return Region(array.ctypes.data, array.nbytes)


def copy_natively(
    shards: Sequence[tuple[Region, Plan]],
    memories: Sequence[Region],
    *,
    into_memory: bool,
    threads: int,
    encodings: Sequence[Encoding | None] = (),
    narrowed: bool = False,
) -> list[int] | None:
    """Carry out the plans of some shards; None if there is no extension, and nothing was done.

    Every bound is checked before the first byte is copied. Bytes that several copies write have the value of any of them.

    Args:
        shards: where each lies, and its plan.
        memories: where each memory lies.
        into_memory: whether shards are copied to memories, and not the other way.
        threads: at most so many share the work.
        encodings: of the shards' elements; those without one, or all if none is given, are not counted.
        narrowed: whether shards of float32 are rounded to bfloat16, to the nearest, ties to even, on their way into memory. Plans and
            encodings are for bfloat16.

    Returns:
        For each shard how many of the elements that were copied are non-finite, an element that goes to two places twice. If narrowed,
        above 0 for a shard that has elements that are NaN or come out infinite, and must be cast by other means.

    Raises:
        ValueError: a plan is malformed or goes beyond a region, a copy's two sides overlap, or it cuts an element that is counted.
    """
    native = _extension()
    if native is None:
        return None
    regions = [np.array(each, np.int64) for each in ([region for region, _ in shards], memories)]
    found = np.zeros(len(shards), np.int64)
    plans = [plan for _, plan in shards]
    native.copy(plans, *regions, into_memory, threads, packed_encodings(encodings), found, narrowed)
    counts: list[int] = found.tolist()
    return counts


def packed_encodings(encodings: Sequence[Encoding | None]) -> NDArray[np.int64]:
    """Encodings for the C extension, three words each: zeros of one that is None."""
    words = [(0, 0, 0) if each is None else (each.itemsize, each.mask, each.width) for each in encodings]
    return np.array(words, np.int64).reshape(-1, 3)


def count_natively(
    parts: NDArray[np.int64], encodings: NDArray[np.int64], threads: int = 1
) -> NDArray[np.int64] | None:
    """How many elements of parts of host memory are non-finite; None if there is no extension.

    Args:
        parts: address and bytes of each, shape [n, 2].
        encodings: as `packed_encodings` makes them, one for each part.
        threads: at most so many share the parts.
    """
    native = _extension()
    if native is None:
        return None
    found = np.zeros(len(parts), np.int64)
    native.count(np.ascontiguousarray(parts), np.ascontiguousarray(encodings), found, threads)
    return found


def sum_natively(rows: NDArray[np.int64], words: NDArray[np.int64], threads: int = 1) -> NDArray[np.int64]:
    """Sums of the words of the sources of copies of rows, modulo 2**64.

    Args:
        rows: see `byte_rows.Rows`.
        words: bytes of a word, for each: 1, 2, 4 or 8. Words of more than one byte have a sign.
        threads: at most so many share the work.

    Raises:
        RuntimeError: there is no extension.
        ValueError: words have another size.
    """
    found = np.zeros(len(rows), np.int64)
    _needed().add_words(np.ascontiguousarray(rows), np.ascontiguousarray(words), found, threads)
    return found


def ask_natively(function: int, rows: NDArray[np.int64], direction: int, stream: int) -> int:
    """Ask a copy engine for copies of rows, until it refuses one; the code of the last call.

    Args:
        function: address of ``cudaMemcpy2DAsync``.
        rows: see `byte_rows.Rows`.
        direction: the kind of copy, as the function takes it.
        stream: handle of the stream.

    Raises:
        RuntimeError: there is no extension.
    """
    code: int = _needed().ask(function, np.ascontiguousarray(rows), direction, stream)
    return code


def has_extension() -> bool:
    """Whether the C extension is there."""
    return _extension() is not None


def _needed() -> ModuleType:
    native = _extension()
    if native is None:
        raise RuntimeError("the C extension is missing")
    return native


@functools.cache
def _extension() -> ModuleType | None:
    try:
        from weighbridge._memory import _native
    except ImportError as error:
        log.info(
            "the C extension is missing (%s): torch and numpy copy and count instead, which is slower; "
            "to build it, run pip install on weighbridge's source where there is a C compiler",
            error,
        )
        return None
    return _native
