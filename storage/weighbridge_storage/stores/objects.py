"""Interface of an object store.

A store maps keys such as ``models/acme/smol/head.json`` to bytes. Objects are written atomically: a reader sees either
the old object or the new object, never a part. Conditional writes are the only coordination between writers.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.text.shortening import shown
from weighbridge.errors import (
    DataLoss,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)

MAX_KEY_LENGTH = 1024
"""Maximum characters of a key; S3's limit, in bytes."""
MAX_COMPONENT_LENGTH = 255
"""Maximum bytes between two slashes of a key; the limit of file systems."""
MOST_WHOLE_BYTES = 1 << 30
"""Size in bytes of the largest object that `ObjectStore.get` reads. Documents and registered files are much smaller;
weights are read in parts.
"""

ByteArray: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory with the bytes that a store writes."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Condition of a write: the object exists and still has this etag."""

    etag: str


PutMode: TypeAlias = Literal["create", "overwrite"] | IfMatch


class ObjectStore(ABC):
    """Interface of all stores. All methods may be called from any thread, and from several processes concurrently.

    In addition to its documented errors, every method may raise InvalidArgument (`check_key` rejects the key),
    ResourceExhausted (no space, quota or file handles left), Unavailable (the store is unreachable or denies access),
    and DataLoss (the device reports that it lost bytes).
    """

    @property
    def is_near(self) -> bool:
        """Whether its objects are files on this machine, so that repeated reads are cheap."""
        return False

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, str]:
        """Content and etag of an object. Two objects with the same etag have the same content.

        Raises:
            NotFound: the object does not exist.
            DataLoss: the object is longer than `MOST_WHOLE_BYTES`. Objects that Weighbridge reads whole are never this
                long.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        """Write an object atomically. It is durable on return.

        Args:
            key: key of the object.
            data: the content, or its pieces in order. If the iterator of the pieces raises, nothing is written.
            mode: ``"create"`` (the object must not exist yet), ``"overwrite"`` (it may exist), or `IfMatch`.

        Returns:
            The new object's etag.

        Raises:
            Conflict: the condition does not hold; nothing was written.
            DeadlineExceeded: it is unknown whether the object was written, or will still be written.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of an object in bytes.

        Raises:
            NotFound: the object does not exist.
        """

    @abstractmethod
    def modified_ms(self, key: str) -> int:
        """Time at which an object was written, by the store's clock, in milliseconds since 1970 UTC.

        Some stores round down to seconds.

        Raises:
            NotFound: the object does not exist.
        """

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """``length`` bytes of an object from byte ``start`` on.

        Raises:
            NotFound: the object does not exist.
            InvalidArgument: the range is not within the object.
        """

    @abstractmethod
    def stream(self, key: str) -> Iterator[bytes | memoryview]:
        """The whole object in consecutive pieces. All pieces have the same etag.

        Each is valid only until the next piece is taken.

        A remote store prefetches the next pieces, and keeps a limited part of the object in memory.

        Raises:
            NotFound: the object does not exist.
            Unavailable: the object was replaced while it was read.
        """

    def open(self, key: str) -> int | None:
        """A descriptor for reading the object; None if the store's objects are not files on this machine.

        The caller closes the descriptor.

        Its content stays the same even if the object is replaced. A store opens either all of its objects or none.

        Raises:
            NotFound: the object does not exist, and the store opens objects.
        """
        return None

    def presigned_url(self, key: str, seconds: int) -> str | None:
        """A URL with which any client can GET the object, or a range of it, for a limited time; None if this store does
        not support such URLs.

        Does not make a request to the store, so the object may not exist.

        Args:
            key: key of the object.
            seconds: seconds for which the URL is valid.
        """
        return None

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """All keys that begin with ``prefix``, in no particular order.

        Keys that are written or deleted during the iteration may or may not be included. Objects of other programs are
        skipped if their names are not valid keys (`check_key`).
        """

    @abstractmethod
    def folders(self, prefix: str) -> Iterator[str]:
        """The distinct next components, without slash, of all keys that continue after ``prefix`` with a component and
        a slash.

        ``folders("models/acme/")`` yields ``smol`` if ``models/acme/smol/head.json`` exists. The order is undefined.
        Some servers continue to list a folder after its last object was deleted.

        Raises:
            InvalidArgument: ``prefix`` is neither empty nor ends with a slash.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object, durably. Does nothing if it does not exist."""

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Make ``target`` an object with the content of ``source``. An existing object is replaced.

        Atomic and durable like `put`, and cheap if the store can share the bytes.

        Raises:
            NotFound: the object at ``source`` does not exist.
        """

    @abstractmethod
    def discard_unfinished(self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None) -> int:
        """Remove unfinished objects of writers that died. Returns their number.

        Args:
            prefix: prefix of the objects' keys.
            older_than_s: age in seconds from which a write counts as dead if the store cannot determine this. If such a
                write is still running, it fails without writing anything.
            only: filter by key, if the store knows the keys; by default all.
        """

    def with_time_limit(self, seconds: float) -> ObjectStore:
        """The same store with a timeout on requests without progress, and fewer attempts.

        Returns this store if it does not make requests.
        """
        return self

    @abstractmethod
    def close(self) -> None:
        """Close connections, threads and files. The store cannot be used afterwards. Closing it again does nothing."""


def check_key(key: str) -> str:
    """Returns ``key`` if it is valid: components of printable characters, separated by single slashes.

    Raises:
        InvalidArgument: it is empty, absolute, longer than `MAX_KEY_LENGTH` characters, or has a component that is
            empty, starts with a dot (so ``.`` and ``..`` too) or is longer than `MAX_COMPONENT_LENGTH` bytes, or
            has a backslash, a NUL or anything else that is not printable.
    """
    if not key:
        raise InvalidArgument("an object key is empty")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidArgument(f"object key {shown(key)} has {len(key)} characters, more than {MAX_KEY_LENGTH}")
    if "\\" in key or not key.isprintable():
        raise InvalidArgument(f"object key {shown(key)} has a backslash or a character that is not printable")
    for part in key.split("/"):
        if not part or part.startswith(".") or len(part.encode()) > MAX_COMPONENT_LENGTH:
            raise InvalidArgument(
                f"object key {shown(key)} has the component {shown(part)}",
                fix=f"components have 1 to {MAX_COMPONENT_LENGTH} bytes and do not start with a dot; "
                "keys do not start or end with a slash",
            )
    return key


def is_key(text: str) -> bool:
    """Whether an object can have this key."""
    with suppress(InvalidArgument):
        return check_key(text) == text
    return False


def check_prefix(prefix: str) -> str:
    """Returns ``prefix`` if a key can begin with it. The empty prefix is valid.

    Raises:
        InvalidArgument: keys cannot begin with it.
    """
    check_key(prefix + "x")
    return prefix


def check_folder_prefix(prefix: str) -> str:
    """Returns ``prefix`` if it is empty, or if it ends with a slash and a key can begin with it.

    Raises:
        InvalidArgument: it is neither.
    """
    if check_prefix(prefix) and not prefix.endswith("/"):
        raise InvalidArgument(f"prefix {shown(prefix)} does not end with a slash")
    return prefix


def pieces_of(data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
    """The bytes of an argument of `ObjectStore.put`, piece by piece. Errors of the caller's iterator pass through.

    Raises:
        InvalidArgument: a piece is not contiguous memory.
    """
    whole = isinstance(data, bytes | bytearray | memoryview | np.ndarray)
    pieces: Iterable[Any] = [data] if whole else data
    for piece in pieces:
        try:
            size = len(piece) if isinstance(piece, bytes | bytearray) else piece.nbytes
            # Through numpy: a memoryview cannot cast an empty array or a format that `struct` does not know.
            view = np.frombuffer(piece, dtype=np.uint8).data if size else memoryview(b"")
        except (TypeError, ValueError, AttributeError, BufferError) as error:
            raise InvalidArgument(f"a piece of type {type(piece).__name__} is not contiguous bytes") from error
        yield view


_NO_ROOM = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit on a file's size is reached",
    errno.ENOMEM: "no memory is left",
    errno.EMFILE: "this process has too many open files",
    errno.ENFILE: "the system has too many open files",
}


_ALLOW = "let the service's user read and write the store's folder and all that is in it, e.g. chown -R USER FOLDER"
_NOT_ALLOWED = {
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EROFS: "mount the store's file system writable (rw)",
}


def check_whole(nbytes: int, what: str) -> None:
    """Raise DataLoss if an object of this length is too long to be read whole: it would fill the reader's memory."""
    if nbytes > MOST_WHOLE_BYTES:
        raise DataLoss(
            f"{what} failed: it has {nbytes} bytes, but Weighbridge writes at most {MOST_WHOLE_BYTES} there",
            fix="restore it from a backup",
        )


def error_for(error: OSError, what: str) -> WeighbridgeError:
    """The error to raise to a caller after an error of the operating system.

    Args:
        error: error of the system call.
        what: the operation, e.g. ``writing models/acme/smol/head.json``.

    Returns:
        ResourceExhausted, DataLoss (the device failed) or Unavailable, to be raised from ``error``.
    """
    if error.errno in _NO_ROOM:
        return ResourceExhausted(
            f"{what} failed: {_NO_ROOM[error.errno]}", fix="make room or raise the limit, then try again"
        )
    reason = error.strerror or type(error).__name__
    if error.errno == errno.EIO:
        return DataLoss(f"{what} failed: the device reports {reason!r}", fix="check the disk")
    if error.errno in _NOT_ALLOWED:
        return Unavailable(f"{what} failed: {reason}", fix=_NOT_ALLOWED[error.errno])
    return Unavailable(f"{what} failed: {reason}", fix="check the store's permissions and its mount")
