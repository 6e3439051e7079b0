"""File on disk that holds some blocks of a much larger range of bytes, and frees the room of the others.

It is sparse: blocks that were not written take no room, and a discarded block becomes a hole again. So every byte lies at its own
place, however many blocks there are. Nothing is read or written through a mapping: where the disk fails, or is full, that would
raise SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import xxhash

from weighbridge._memory.file_reads import STEP_BYTES, read_into
from weighbridge.errors import FailedPrecondition
from weighbridge_storage.stores.objects import ByteArray, error_for

_CANNOT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_UNIT_OF_ST_BLOCKS = 512


class BlockFile:
    """A sparse file without a name, deleted with its last user. Safe to use from many threads.

    Args:
        folder: folder of the file; must exist.
        nbytes: its size; a multiple of the page size, at least one page.

    Raises:
        ResourceExhausted, Unavailable: it cannot be made.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        try:
            with tempfile.TemporaryFile(dir=folder, prefix=".blocks-", buffering=0) as file:
                os.truncate(file.fileno(), nbytes)
                self._map = mmap.mmap(file.fileno(), nbytes)  # only to make holes
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise error_for(error, f"making a cache file in {folder}") from error
        weakref.finalize(self, os.close, self._fd)

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes on disk now."""
        return os.fstat(self._fd).st_blocks * _UNIT_OF_ST_BLOCKS

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes at an offset.

        Raises:
            OSError: they could not all be written.
        """
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def read_into(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """Fill an array with bytes; ranges that were not written read as zeros.

        Raises:
            OSError: they cannot be read.
        """
        read_into(self._fd, target, offset, strides)

    def xxh3_128(self, offset: int, nbytes: int) -> str:
        """XXH3-128 of a range of bytes, as 32 hex digits.

        Raises:
            OSError: they cannot be read.
        """
        digest, buffer = xxhash.xxh3_128(), np.empty(min(nbytes, STEP_BYTES), np.uint8)
        for start in range(0, nbytes, STEP_BYTES):
            part = buffer[: min(STEP_BYTES, nbytes - start)]
            read_into(self._fd, part, offset + start, (1,))
            digest.update(part.data)
        return digest.hexdigest()

    def discard(self, offset: int, nbytes: int) -> None:
        """Make a hole of whole pages. No thread may be reading there.

        Raises:
            OSError: the file system cannot make holes.
        """
        self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)


def check_holes(folder: Path) -> None:
    """Check that files in a folder can give room back.

    Raises:
        FailedPrecondition: the file system cannot do that.
        ResourceExhausted, Unavailable: nothing can be written there.
    """
    try:
        file = BlockFile(folder, mmap.PAGESIZE)
        file.write(b"x" * mmap.PAGESIZE, 0)
        file.discard(0, mmap.PAGESIZE)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise error_for(error, f"writing a cache file in {folder}") from error
        raise FailedPrecondition(
            f"the file system of {folder} cannot make holes in files, which a cache of bounded size needs",
            fix="name another --scratch: ext4, XFS, Btrfs and tmpfs can",
        ) from error
