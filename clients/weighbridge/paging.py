"""How are pages of a mapping entered into this process's page table before they are touched?

One by one, as they are touched, takes far longer.
"""

from __future__ import annotations

import ctypes
import os

POPULATE_READ, POPULATE_WRITE = 22, 23
"""Linux 5.14's advices; Python has no names for them yet. Source: madvise(2)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def enter_pages(address: int, nbytes: int, advice: int) -> None:
    """Enter the pages of a part of a mapping; other threads run meanwhile.

    Args:
        address: of the first byte; the beginning of a page.
        nbytes: how many.
        advice: `POPULATE_WRITE` also makes pages that there are not yet, `POPULATE_READ` only those of a file.

    Raises:
        OSError: an older kernel, or there is no memory for them.
    """
    if _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
