"""Pages of mappings: alignment of a mapping for huge pages, and allocation and entry of pages before they are accessed.

Page by page on first access, both take far longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

HUGE_PAGE = 2 << 20
"""Bytes of a huge page, on x86-64 and on arm64 with pages of 4 KiB."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Advices of Linux 5.14; Python has no names for them yet. Source: madvise(2)."""
COLLAPSE = 25
"""Advice of Linux 6.1; as above."""
DO_NOT_FORK = mmap.MADV_DONTFORK
"""Forked children do not have the pages: an access there is a segmentation fault."""

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
    """Give the kernel advice on the pages of a part of a mapping, without the interpreter's lock.

    Args:
        address: address of the first byte; the beginning of a page.
        nbytes: number of bytes.
        advice: `POPULATE_WRITE` also allocates missing pages, `POPULATE_READ` only enters those of a file. `COLLAPSE`
            makes huge pages where at least one small page exists.

    Raises:
        OSError: the kernel is too old, or there is not enough memory.
    """
    if _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Let memory that was not accessed yet be allocated in huge pages, where whole ones fit: its first access takes
    half the time then.
    """
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    pages = (address + nbytes - first) // HUGE_PAGE
    if pages > 0:
        with contextlib.suppress(OSError):  # a kernel without them
            advise(first, pages * HUGE_PAGE, mmap.MADV_HUGEPAGE)


def map_aligned(descriptor: int, nbytes: int, flags: int, protection: int) -> tuple[mmap.mmap, int]:
    """Map a file, from its beginning, at a multiple of `HUGE_PAGE`: elsewhere, huge pages are entered as small ones.

    Args:
        descriptor: descriptor of the file; the caller closes it.
        nbytes: number of bytes; whole pages.
        flags: as in mmap(2).
        protection: as in mmap(2).

    Returns:
        A larger mapping that contains the file, and the offset of the file's first byte in it. All of it is unmapped
        together.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """
    try:
        around = mmap.mmap(-1, nbytes + HUGE_PAGE, _AROUND, protection)
    except OSError:  # without overcommit, the kernel requires memory for it, though it is never used
        return mmap.mmap(descriptor, nbytes, flags, protection), 0
    start = address_of(around)
    offset = -start % HUGE_PAGE
    if _libc.mmap(start + offset, nbytes, protection, flags | _MAP_FIXED, descriptor, 0) == _FAILED:
        number = ctypes.get_errno()
        around.close()
        raise OSError(number, os.strerror(number))
    return around, offset


def address_of(mapping: mmap.mmap) -> int:
    """Address of a mapping, writable or not."""
    import numpy as np

    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
