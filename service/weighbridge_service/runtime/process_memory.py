"""Memory settings of a process that plans and transfers weights: allocator and garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEEP_BYTES = 256 << 20
_KEEP_AT_END_BYTES = 32 << 20
"""Free bytes that stay at the top of each of the allocator's arenas. Arenas of threads return memory to the system only
above this threshold.
"""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COLLECT_AFTER = (50_000, 20, 100)


def keep_freed_memory() -> None:
    """Make the allocator keep the memory of freed messages of a megabyte instead of returning it to the system after
    each.

    Otherwise each message is copied into fresh pages, whose allocation costs more than the copy. Only glibc supports
    this.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_AT_END_BYTES)


def give_back(kept: int, growth: int) -> int:
    """Return freed memory to the system if it has grown. Trimming searches all arenas, which is slow.

    Args:
        kept: return value of the previous call; 0 at first.
        growth: bytes by which freed memory must have grown since then.

    Returns:
        Free bytes of the allocator before the trim, or ``kept`` if that is less and nothing was trimmed.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallinfo2.restype = _Mallinfo2
        free = int(libc.mallinfo2().fordblks)
        if free <= kept + growth:
            return min(free, kept)
        trim()
        return free
    return kept


def trim() -> None:
    """Return freed memory to the system. Takes 1 to 20 ms for a few hundred MiB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def settle() -> None:
    """Collect garbage from startup and imports once, and exclude the remaining objects from later collections, because
    they are never freed.
    """
    gc.collect()
    gc.freeze()


class _Mallinfo2(ctypes.Structure):
    """Statistics of the allocator: ``struct mallinfo2`` of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def private_bytes() -> int:
    """Bytes of resident memory of this process without shared memory, such as images of versions."""
    with Path("/proc/self/statm").open("rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * _PAGE


def collect_rarely() -> None:
    """Make garbage collections rarer: the plan of a large model is a million small objects without cycles.

    With the default thresholds, traversing them takes a third of the planning time.
    """
    gc.set_threshold(*_COLLECT_AFTER)
