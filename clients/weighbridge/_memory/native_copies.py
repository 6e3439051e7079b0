"""Strided copies within host memory by the C extension, a whole plan in one call without the interpreter's lock.

torch takes some microseconds for each copy, and reads the target's cache lines before it writes them; the extension
writes past the caches. It counts non-finite elements while they are in registers. Without it, torch and numpy do the
same.
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
"""Copies of one shard, packed: for each its memory, offset there, offset in the shard, number of axes, and for each
axis the extent, the stride in memory and the stride in the shard."""


class AddressRange(NamedTuple):
    """Bytes at an address, which the caller keeps alive."""

    address: int
    nbytes: int


def region_of(array: NDArray[np.uint8], *, written: bool) -> AddressRange:
    """Region of an array's bytes.

    Raises:
        ValueError: the array is not contiguous, or is to be written and is read-only.
    """
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        raise ValueError("the array is not contiguous, or is read-only and would be written to")
    return AddressRange(array.ctypes.data, array.nbytes)


def copy_natively(
    shards: Sequence[tuple[AddressRange, Plan]],
    memories: Sequence[AddressRange],
    *,
    into_memory: bool,
    threads: int,
    encodings: Sequence[Encoding | None] = (),
    narrowed: bool = False,
) -> list[int] | None:
    """Carry out the plans of some shards; None, with nothing done, if there is no extension.

    Every bound is checked before the first byte is copied. Bytes that several copies write have the value of any of
    them.

    Args:
        shards: region and plan of each.
        memories: region of each.
        into_memory: whether to copy from shards to memories, and not the other way.
        threads: most threads that share the work.
        encodings: encodings of the shards' elements; shards without one, or all if none is given, are not counted.
        narrowed: whether shards of float32 are rounded to bfloat16, to the nearest, ties to even, while they are copied
            into memory. Plans and encodings are for bfloat16.

    Returns:
        For each shard the number of copied elements that are non-finite; an element that goes to two places counts
        twice. If narrowed, above 0 for a shard with elements that are NaN or become infinite, which must be cast by
        other means.

    Raises:
        ValueError: a plan is malformed or exceeds a region, a copy's two sides overlap, or it splits an element that is
            counted.
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
    """Encodings for the C extension, three words each; zeros for None."""
    words = [(0, 0, 0) if each is None else (each.itemsize, each.mask, each.width) for each in encodings]
    return np.array(words, np.int64).reshape(-1, 3)


def count_natively(
    parts: NDArray[np.int64], encodings: NDArray[np.int64], threads: int = 1
) -> NDArray[np.int64] | None:
    """Numbers of non-finite elements in parts of host memory; None if there is no extension.

    Args:
        parts: address and bytes of each, shape [n, 2].
        encodings: one for each part, as by `packed_encodings`.
        threads: most threads that share the parts.
    """
    native = _extension()
    if native is None:
        return None
    found = np.zeros(len(parts), np.int64)
    native.count(np.ascontiguousarray(parts), np.ascontiguousarray(encodings), found, threads)
    return found


def sum_natively(rows: NDArray[np.int64], words: NDArray[np.int64], threads: int = 1) -> NDArray[np.int64]:
    """Sums of the words in the sources of copies of rows, modulo 2**64.

    Args:
        rows: see `byte_rows.Rows`.
        words: bytes of a word, for each: 1, 2, 4 or 8. Words of more than one byte are signed.
        threads: most threads that share the work.

    Raises:
        RuntimeError: there is no extension.
        ValueError: words have another size.
    """
    found = np.zeros(len(rows), np.int64)
    _needed().add_words(np.ascontiguousarray(rows), np.ascontiguousarray(words), found, threads)
    return found


def ask_natively(function: int, rows: NDArray[np.int64], direction: int, stream: int) -> int:
    """Submit copies of rows to a copy engine, until it refuses one. Returns the code of the last call.

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
    """Whether the C extension is available."""
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
            "to build it, run pip install on weighbridge's source on a machine with a C compiler",
            error,
        )
        return None
    return _native
