"""Bytes of one file of a version, independent of their location.

Every file of a version has its own source: if a pull reads two files, one may be in an image and the other in a remote
store.
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
    """Prefetched bytes, which stay until they are released.

    Attributes:
        key: identifies the bytes; two requests for the same bytes have equal keys.
        nbytes: number of the bytes.
    """

    @property
    def key(self) -> Hashable: ...  # noqa: D102

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def release(self) -> None:
        """Release the bytes. Call it once."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a file's bytes for another process on this machine.

    Attributes:
        key: identifies the memory or the file that contains them.
        nbytes: size of this memory or file.
        offset: offset of the file's first byte in it.
        open: returns a descriptor for reading it. The caller closes the descriptor. Raises OSError or NotFound if it no
            longer exists.
        lasting: whether it is memory that is reused for later versions, as opposed to a file.
        leave_open: reports that a process with a descriptor disconnected without releasing it.
        digests: digests of parts of the file, for processes that read them there.
        kept_by_readers: whether only readers keep it, because no version needs it any longer.
        is_left_open: whether `leave_open` was called, and that process may still have it open.
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

    Arguments describe bytes as in a strided array: one byte for each index, at the offset plus the sum over the axes of
    index times stride. Strides are not negative.

    Errors of all methods: DataLoss (the file no longer exists, or differs from the manifest), Unavailable (it is
    unreachable) and ResourceExhausted (no space for its bytes).
    """

    @property
    def is_near(self) -> bool:
        """Whether the bytes are in memory or in a file on this machine.

        Otherwise, call `prepare` before reading them.
        """
        return True

    @property
    def damaged(self) -> bool:
        """Whether any of its bytes did not match their digest."""
        return False

    @property
    def identity(self) -> Hashable:
        """Identity of the file. It differs from the identity of a later file with the same name.

        None if the file is not on this machine.
        """
        return None

    @abstractmethod
    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """Fill ``target``, which may have any shape and strides, with bytes of the file.

        Args:
            target: array to fill.
            offset: offset of the first byte in the file.
            strides: distances in the file, one for each axis of ``target``.
        """

    def prepare(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[Kept] | None:
        """Begin to fetch bytes that will be copied soon, and keep them. Returns None if there is no space for them.

        Args:
            offset: offset of the first byte in the file.
            shape: number of bytes on each axis.
            strides: distances in the file.
        """
        return ()

    @property
    def place(self) -> Place | None:
        """Location from which another process can map it; None if it cannot."""
        return None

    def read(self, offset: int, nbytes: int) -> ByteArray:
        """Contiguous bytes: a view if they are in memory, otherwise a copy."""
        target = np.empty(nbytes, np.uint8)
        self.copy_to(target, offset, (1,))
        return target


class MappedBytes(FileBytes):
    """A file in memory.

    Args:
        data: all its bytes.
        place: location from which another process can map it.
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
    """A file on this machine, or a part of a file, read with pread.

    A failed read raises an error, whereas a mapping would end the process.

    Args:
        descriptor: descriptor of the file; closed with this object.
        name: name of the version's file.
        title: name of the version, for messages.
        base: offset in the descriptor's file at which the version's file begins.
        place: location from which another process can open it.
        digests: digests of parts of it, disjoint and sorted by offset. The parts are compared as they are read.
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
        """See `FileBytes.identity`. It also changes when the file is written again in place."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino, found.st_size, self._written_ns

    @property
    def damaged(self) -> bool:
        """See `FileBytes.damaged`."""
        return self._checks is not None and self._checks.damaged

    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`.

        Raises:
            DataLoss: bytes cannot be read, or do not match their digest.
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
    """The error to raise when bytes of a version's file cannot be read.

    Args:
        error: error of the read.
        name: name of the file.
        title: name of the version.
        where: location of the bytes, for the message.
    """
    what = f"reading {name} of {title}"
    if isinstance(error, EOFError):
        return DataLoss(
            f"{what} failed: {where} is shorter than the manifest records, {error}",
            fix=f"`weighbridge verify {title}` reports what is left of it; restore the file from a backup",
            worth_retrying=0.0,
        )
    found = error_for(error, what)
    if isinstance(found, DataLoss):
        found.worth_retrying = 0.0
    return found
