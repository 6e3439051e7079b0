"""Bytes of one file of a version: where they are, and how some of them are had.

Every file of a version has a source of its own: of two files that a pull reads, one may lie in an image and the other in a
remote store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weighbridge_storage.stores.objects import ByteArray


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
    """

    key: str
    nbytes: int
    offset: int
    open: Callable[[], int]
    lasting: bool
    leave_open: Callable[[], None]


class FileBytes(ABC):
    """The bytes of one file, read-only. All methods may be called from any thread.

    Which bytes are meant is said as in a strided array: one byte for each index, at the sum of the offset and the index on
    each axis times the stride of that axis. Strides are not negative.

    Errors of all methods: DataLoss (the file is gone, or is not what the manifest says it is), Unavailable (it cannot be
    reached) and ResourceExhausted (no room to put its bytes).
    """

    @property
    @abstractmethod
    def whole(self) -> ByteArray | None:
        """All of the file, if it lies in memory or is mapped; None if its bytes have to be brought first."""

    @abstractmethod
    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """Fill ``target``, of any shape and strides of its own, with bytes of the file.

        Args:
            target: where to; one stride for each of its axes is given.
            offset: of the first byte in the file.
            strides: distances in the file.
        """

    @abstractmethod
    def prepare(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[Kept] | None:
        """Begin to bring bytes that will be copied soon, and keep them; None if there is no room for that.

        Args:
            offset: of the first byte in the file.
            shape: how many bytes on each axis.
            strides: distances in the file.
        """

    @property
    def place(self) -> Place | None:
        """Where another process can map it; None if it cannot."""
        return None

    def read(self, offset: int, nbytes: int) -> ByteArray:
        """Bytes next to each other: where they lie if they are all there, and a copy otherwise."""
        whole = self.whole
        if whole is not None:
            return whole[offset : offset + nbytes]
        target = np.empty(nbytes, np.uint8)
        self.copy_to(target, offset, (1,))
        return target


class MappedBytes(FileBytes):
    """A file that lies in memory, or is mapped.

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

    @property
    def whole(self) -> ByteArray:
        """See `FileBytes.whole`."""
        return self._data

    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`."""
        np.copyto(target, np.ndarray(target.shape, np.uint8, self._data, offset, strides))

    def prepare(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[Kept]:
        """See `FileBytes.prepare`. Nothing is to be done."""
        return ()
