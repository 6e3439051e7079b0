"""Strided copies within host memory by the C extension, a whole plan in one call without the interpreter's lock.

torch takes some microseconds for each copy, and reads the target's lines before it writes them; the extension streams past the caches.
Without it, torch and numpy do the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    shards: Sequence[tuple[Region, Plan]], memories: Sequence[Region], *, into_memory: bool, threads: int
) -> bool:
    """Carry out the plans of some shards; False if there is no extension, and nothing was done.

    Every bound is checked before the first byte is copied. Bytes that several copies write have the value of any of them.

    Args:
        shards: where each lies, and its plan.
        memories: where each memory lies.
        into_memory: whether shards are copied to memories, and not the other way.
        threads: at most so many share the work.

    Raises:
        ValueError: a plan is malformed or goes beyond a region, or a copy's two sides overlap.
    """
    native = _extension()
    if native is None:
        return False
    regions = [np.array(each, np.int64) for each in ([region for region, _ in shards], memories)]
    native.copy([plan for _, plan in shards], *regions, into_memory, threads)
    return True


@functools.cache
def _extension() -> ModuleType | None:
    try:
        from weighbridge import _native
    except ImportError as error:
        log.info(
            "the C extension is missing (%s): torch and numpy copy instead, which is slower for short rows; "
            "to build it, run pip install on weighbridge's source where there is a C compiler",
            error,
        )
        return None
    return _native
