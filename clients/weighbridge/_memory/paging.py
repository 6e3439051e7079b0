"""Pages of mappings: where a mapping lies, so that it can have huge ones, and how they are made and entered before they are touched.

One by one, as they are touched, takes far longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

HUGE_PAGE = 2 << 20
"""Bytes of a huge page, on x86-64 and on arm64 with pages of 4 KiB."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Linux 5.14's advices; Python has no names for them yet. Source: madvise(2)."""
COLLAPSE = 25
"""Linux 6.1's advice; as above."""
DO_NOT_FORK = mmap.MADV_DONTFORK
"""Children that are forked do not have the pages: touching them there is a segmentation fault."""

_MAP_FIXED = 0x10
_AROUND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Give the kernel advice on the pages of a part of a mapping; other threads run meanwhile.

    Args:
        address: of the first byte; the beginning of a page.
        nbytes: how many.
        advice: `POPULATE_WRITE` also makes pages that there are not yet, `POPULATE_READ` only those of a file. `COLLAPSE` makes huge
            pages of those of which there is at least one small page.

    Raises:
        OSError: an older kernel, or there is no memory for them.
    """
    if _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Let memory that was not touched yet be made in huge pages, as far as whole ones lie in it: its first touch takes half the time then."""
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    pages = (address + nbytes - first) // HUGE_PAGE
    if pages > 0:
        with contextlib.suppress(OSError):  # a kernel without them
            advise(first, pages * HUGE_PAGE, mmap.MADV_HUGEPAGE)


def map_aligned(descriptor: int, nbytes: int, flags: int, protection: int) -> tuple[mmap.mmap, int]:
    """A mapping of a file, from its beginning, at a multiple of `HUGE_PAGE`: elsewhere, huge pages are entered as small ones.

    Args:
        descriptor: of the file; stays the caller's.
        nbytes: how many; whole pages.
        flags: as in mmap(2).
        protection: likewise.

    Returns:
        A larger mapping, in which the file lies, and the offset of the file's first byte there. All of it is unmapped together.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """
    try:
        around = mmap.mmap(-1, nbytes + HUGE_PAGE, _AROUND, protection)
    except OSError:  # where memory is not overcommitted, room for it is asked for, though it is never used
        return mmap.mmap(descriptor, nbytes, flags, protection), 0
    start = address_of(around)
    offset = -start % HUGE_PAGE
    if _libc.mmap(start + offset, nbytes, protection, flags | _MAP_FIXED, descriptor, 0) == _FAILED:
        number = ctypes.get_errno()
        around.close()
        raise OSError(number, os.strerror(number))
    return around, offset


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins, be it writable or not."""
    import numpy as np

    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
