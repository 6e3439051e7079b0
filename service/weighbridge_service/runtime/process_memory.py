"""Memory settings of a process that plans and carries weights: allocator, and garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEEP_BYTES = 256 << 20
_KEEP_AT_END_BYTES = 32 << 20
"""At the end of each of the allocator's arenas: of those of threads, nothing but this threshold gives that back."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COLLECT_AFTER = (50_000, 20, 100)


def keep_freed_memory() -> None:
    """Let the allocator keep what messages of a megabyte free, instead of handing it back after each.

    Otherwise each message is copied into pages that are fresh, which costs more than the copy. Only glibc has this.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_AT_END_BYTES)


def give_back(kept: int, growth: int) -> int:
    """Hand what was freed back to the system, if it has grown: to look for it in all arenas takes a while.

    Args:
        kept: what this gave the last time; 0 at first.
        growth: bytes by which freed memory must have grown since.

    Returns:
        Bytes that are free now. Pages of them may have gone back.
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
    """Hand what was freed back to the system; 1 to 20 ms for some hundred MiB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def settle() -> None:
    """Look for garbage once among what starting and importing has made, and never again among what is left: it stays."""
    gc.collect()
    gc.freeze()


class _Mallinfo2(ctypes.Structure):
    """What the allocator says of itself: ``struct mallinfo2`` of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def private_bytes() -> int:
    """Bytes of memory that this process has for itself: without what it shares, as images of versions are."""
    with Path("/proc/self/statm").open("rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * _PAGE


def collect_rarely() -> None:
    """Look for garbage less often: the plan of a large model is a million small objects, none of them in a cycle.

    By default, a third of the time of planning goes into looking through them.
    """
    gc.set_threshold(*_COLLECT_AFTER)
