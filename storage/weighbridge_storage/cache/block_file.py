"""File on disk that stores some blocks of a much larger range of bytes, and frees the space of the other blocks.

The file is sparse: blocks that were not written do not occupy space, and a discarded block becomes a hole again. So
every byte has a fixed place, regardless of the number of blocks. The file is not read or written through a mapping,
which would raise SIGBUS if the disk fails or is full.
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
    """A sparse file without a name. It is deleted with its last user. Thread-safe.

    Args:
        folder: folder of the file; must exist.
        nbytes: size of the file; a multiple of the page size, at least one page.

    Raises:
        ResourceExhausted, Unavailable: the file cannot be created.
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
        """Bytes that it currently occupies on disk."""
        return os.fstat(self._fd).st_blocks * _UNIT_OF_ST_BLOCKS

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes at an offset.

        Raises:
            OSError: not all bytes could be written.
        """
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def read_into(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """Fill an array with bytes. Ranges that were not written contain zeros.

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
        """Make a hole of whole pages. No thread may read this range at the same time.

        Raises:
            OSError: the file system cannot make holes.
        """
        self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)


def check_holes(folder: Path) -> None:
    """Check that files in a folder can free disk space.

    Raises:
        FailedPrecondition: the file system does not support holes. ResourceExhausted, Unavailable: the folder cannot be
            written to.
    """
    try:
        file = BlockFile(folder, mmap.PAGESIZE)
        file.write(b"x" * mmap.PAGESIZE, 0)
        file.discard(0, mmap.PAGESIZE)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise error_for(error, f"writing a cache file in {folder}") from error
        raise FailedPrecondition(
            f"the file system of {folder} does not support sparse files, which a cache of bounded size needs",
            fix="use a --scratch folder on ext4, XFS, Btrfs or tmpfs",
        ) from error
