"""Bytes of one file of a version: where they are, and how some of them are had.

Every file of a version has a source of its own: of two files that a pull reads, one may lie in an image and the other in a
remote store.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weighbridge._memory.file_reads import Took, read_into
from weighbridge.errors import DataLoss, WeighbridgeError
from weighbridge_storage.memory.read_checks import DigestedRange, ReadChecks
from weighbridge_storage.stores.objects import ByteArray, error_for


class Kept(Protocol):
    """Bytes that were asked for ahead, and stay until they are released.

    Attributes:
        key: what they are; asking twice for the same bytes gives equal keys.
        nbytes: how many they are.
    """

    @property
    def key(self) -> Hashable: ...  # noqa: D102

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def release(self) -> None:
        """They are no longer needed. To be called once."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where another process of this machine finds a file's bytes.

    Attributes:
        key: names the memory or the file that they lie in.
        nbytes: its size.
        offset: of the file's first byte in it.
        open: gives a descriptor for reading it, which the caller closes. Raises OSError or NotFound if it is gone.
        lasting: whether it is memory that is used again for later versions, and not a file.
        leave_open: says that a process that was given a descriptor has gone without a word.
        digests: of parts of the file, for whoever reads them there.
        kept_by_readers: whether no version needs it any more, and only those who read it keep it.
        is_left_open: whether `leave_open` was said of it, and that process is not known to have closed it.
    """

    key: str
    nbytes: int
    offset: int
    open: Callable[[], int]
    lasting: bool
    leave_open: Callable[[], None]
    digests: Sequence[DigestedRange] = ()
    kept_by_readers: Callable[[], bool] = lambda: False
    is_left_open: Callable[[], bool] = lambda: False


class FileBytes(ABC):
    """The bytes of one file, read-only. All methods may be called from any thread.

    Which bytes are meant is said as in a strided array: one byte for each index, at the sum of the offset and the index on
    each axis times the stride of that axis. Strides are not negative.

    Errors of all methods: DataLoss (the file is gone, or is not what the manifest says it is), Unavailable (it cannot be
    reached) and ResourceExhausted (no room to put its bytes).
    """

    @property
    def is_near(self) -> bool:
        """Whether it lies in memory, or in a file of this machine; otherwise it is worth to `prepare` what will be read."""
        return True

    @property
    def damaged(self) -> bool:
        """Whether bytes of it did not agree with their digest."""
        return False

    @property
    def identity(self) -> Hashable:
        """Tells the file from others that take its name later; None if it is not of this machine."""
        return None

    @abstractmethod
    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """Fill ``target``, of any shape and strides of its own, with bytes of the file.

        Args:
            target: where to; one stride for each of its axes is given.
            offset: of the first byte in the file.
            strides: distances in the file.
        """

    def prepare(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[Kept] | None:
        """Begin to bring bytes that will be copied soon, and keep them; None if there is no room for that.

        Args:
            offset: of the first byte in the file.
            shape: how many bytes on each axis.
            strides: distances in the file.
        """
        return ()

    @property
    def place(self) -> Place | None:
        """Where another process can map it; None if it cannot."""
        return None

    def read(self, offset: int, nbytes: int) -> ByteArray:
        """Bytes next to each other: where they lie if that is memory, and a copy otherwise."""
        target = np.empty(nbytes, np.uint8)
        self.copy_to(target, offset, (1,))
        return target


class MappedBytes(FileBytes):
    """A file that lies in memory.

    Args:
        data: all its bytes.
        place: where another process can map it.
    """

    def __init__(self, data: ByteArray, place: Place | None = None) -> None:
        self._data = data
        self._place = place

    @property
    def place(self) -> Place | None:
        """See `FileBytes.place`."""
        return self._place

    def read(self, offset: int, nbytes: int) -> ByteArray:
        """See `FileBytes.read`."""
        return self._data[offset : offset + nbytes]

    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`."""
        np.copyto(target, np.ndarray(target.shape, np.uint8, self._data, offset, strides))


class FileOnDisk(FileBytes):
    """A file of this machine, or a part of one, that is read by pread: what cannot be read is an error, and not the end of the process.

    Args:
        descriptor: of the file; closed with this object.
        name: of the file of the version.
        title: of the version, for messages.
        base: where the file of the version begins in it.
        place: where another process can open it.
        digests: of parts of it, disjoint and sorted by offset: they are compared as they are read.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        title: str,
        *,
        base: int = 0,
        place: Place | None = None,
        digests: Sequence[DigestedRange] = (),
    ) -> None:
        self._descriptor = descriptor
        self._written_ns = os.fstat(descriptor).st_mtime_ns
        weakref.finalize(self, os.close, descriptor)
        self._name = name
        self._title = title
        self._base = base
        self._place = place
        self._checks = ReadChecks(name, title, digests, self._again) if digests else None

    @property
    def place(self) -> Place | None:
        """See `FileBytes.place`."""
        return self._place

    @property
    def identity(self) -> Hashable:
        """See `FileBytes.identity`. It is also another one once the file was written again in its place."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino, found.st_size, self._written_ns

    @property
    def damaged(self) -> bool:
        """See `FileBytes.damaged`."""
        return self._checks is not None and self._checks.damaged

    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`.

        Raises:
            DataLoss: bytes cannot be read, or do not agree with their digest.
        """
        self._read(target, offset, strides, self._took)

    def _read(self, target: ByteArray, offset: int, strides: tuple[int, ...], took: Took) -> None:
        try:
            read_into(self._descriptor, target, self._base + offset, strides, took)
        except (OSError, EOFError) as error:
            raise unreadable(error, self._name, self._title, "its file") from error

    def _took(self, offset: int, run: ByteArray) -> None:
        if self._checks is not None:
            self._checks.took(offset - self._base, run.data)

    def _again(self, offset: int, nbytes: int) -> memoryview:
        target = np.empty(nbytes, np.uint8)
        self._read(target, offset, (1,), lambda _offset, _run: None)
        return target.data


def unreadable(error: OSError | EOFError, name: str, title: str, where: str) -> WeighbridgeError:
    """The error of bytes of a version's file that cannot be read.

    Args:
        error: what went wrong.
        name: of the file.
        title: of the version.
        where: the bytes are.
    """
    what = f"reading {name} of {title}"
    if isinstance(error, EOFError):
        return DataLoss(
            f"{what} failed: {where} is shorter than the manifest says, {error}",
            fix=f"`weighbridge verify {title}` says what is left of it; restore the file from a backup",
            worth_retrying=0.0,
        )
    found = error_for(error, what)
    if isinstance(found, DataLoss):
        found.worth_retrying = 0.0
    return found
