"""Files without a disk, for a library that requires paths: private keys must not lie in a temporary folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_memory(content: bytes = b"") -> Iterator[Path]:
    """The path of a file with this content; the file is gone after the block."""
    fd = os.memfd_create("weighbridge", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as out:
            out.write(content)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
