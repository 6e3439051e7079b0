"""Images: the buffers in which versions are assembled, with the holds of their users.

An image contains the final bytes of a version's files in one region of shared memory or of an unlinked file on local
disk. Each file begins at a page boundary. `image_pool` creates images.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Self

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_storage.memory.file_bytes import FileBytes, FileOnDisk, MappedBytes, Place
from weighbridge_storage.memory.image_books import HeldFor, Holding, ImageOwner
from weighbridge_storage.memory.regions import PAGE, Region
from weighbridge_storage.stores.objects import ByteArray


class ImageHold:
    """A reader's hold. It keeps the bytes that the reader reads unchanged until it is released. A context manager."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the hold. Repeated calls do nothing."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def together(*holds: ImageHold) -> ImageHold:
    """One hold that releases several."""

    def end() -> None:
        for hold in holds:
            hold.release()

    return ImageHold(end)


class Image:
    """Buffers for the files of one version. An `ImagePool` creates them.

    The caller that acquired the image holds it until `release`; other users take a `hold` while they use it. When the
    last hold ends, the region returns to the pool. Arrays over it that a caller has kept will then contain another
    version's bytes.

    Attributes:
        sizes: size of each file in bytes.
        offsets: byte of the region where each file starts; multiples of `PAGE`.
    """

    def __init__(
        self,
        region: Region,
        sizes: Mapping[str, int],
        owner: ImageOwner,
        done: Callable[[Image, Region], None],
    ) -> None:
        self.sizes: Mapping[str, int] = MappingProxyType(dict(sizes))
        self.offsets: Mapping[str, int] = MappingProxyType(place_files(sizes)[0])
        self._region: Region | None = region
        self._nbytes, self._in_memory = region.capacity, region.in_memory
        self._done = done
        self._lock = threading.Lock()
        self._holds: dict[int, float] = {}  # start of each hold, by its number; that of the acquirer is 1
        self._count = 0
        self._frozen = False
        self._used_at = time.monotonic()
        self._acquirers = self.hold()
        self._owner, self._since = owner, time.monotonic()

    @property
    def buffers(self) -> Mapping[str, ByteArray]:
        """A writable array of bytes for each file; its initial content is undefined.

        Raises:
            FailedPrecondition: the image is frozen, or was returned to the pool.
        """
        if self._frozen:
            raise FailedPrecondition("the image is complete and can no longer be written")
        return self._cut(self._live().writable)

    @property
    def read_only_buffers(self) -> Mapping[str, ByteArray]:
        """A read-only array of bytes for each file.

        Raises:
            FailedPrecondition: the image was returned to the pool.
        """
        return self._cut(self._live().readable)

    @property
    def region(self) -> Region:
        """The region that contains it; valid as long as the image is held.

        Raises:
            FailedPrecondition: the image was returned to the pool.
        """
        return self._live()

    @property
    def file_bytes(self) -> dict[str, FileBytes]:
        """Reader of each file, by name.

        Raises:
            FailedPrecondition: the image was returned to the pool.
        """
        region = self._live()

        def place(name: str) -> Place:
            reopen = functools.partial(region.reopen, writable=False)
            kept = functools.partial(self._is_kept_by_readers, region)
            return Place(
                region.key, region.capacity, self.offsets[name], reopen, region.in_memory, region.left_open,
                kept_by_readers=kept, is_left_open=lambda: region.was_left_open,
            )  # fmt: skip

        if region.in_memory:
            return {name: MappedBytes(data, place(name)) for name, data in self._cut(region.readable).items()}
        return {
            name: FileOnDisk(os.dup(region.fd), name, str(self._owner), base=start, place=place(name))
            for name, start in self.offsets.items()
        }

    @property
    def holding(self) -> Holding:
        """Its holder, and the reason why it is held."""
        with self._lock:
            readers = [since for number, since in self._holds.items() if number > 1]
            if 1 not in self._holds:
                use = HeldFor.READERS if readers else HeldFor.MAPPED
            else:
                use = HeldFor.READY if self._frozen else HeldFor.RECEIVING
            now = time.monotonic()
            reading = now - min(readers, default=now)
            held = now - self._since
            return Holding(self._owner, self._nbytes, self._in_memory, use, held, len(readers), reading)

    @property
    def used_at(self) -> float:
        """Time at which a hold on it last began or ended, in seconds of the monotonic clock."""
        return self._used_at

    def freeze(self) -> None:
        """Reject `buffers` from now on. Writable arrays that were returned earlier stay writable."""
        self._frozen = True

    def hold(self) -> ImageHold:
        """Prevent the image from being returned to the pool.

        Raises:
            FailedPrecondition: the image was already returned.
        """
        with self._lock:
            self._live()
            self._count += 1
            self._used_at = self._holds[self._count] = time.monotonic()
            return ImageHold(functools.partial(self._drop, self._count))

    def release(self) -> None:
        """End the acquirer's own hold. Repeated calls do nothing."""
        self._acquirers.release()

    def _is_kept_by_readers(self, region: Region) -> bool:
        with self._lock:
            return 1 not in self._holds and (bool(self._holds) or region.was_left_open)

    def _drop(self, number: int) -> None:
        with self._lock:
            del self._holds[number]
            self._used_at = time.monotonic()
            if self._holds:
                return
            region, self._region = self._region, None
        if region is not None:
            self._done(self, region)

    def _live(self) -> Region:
        region = self._region
        if region is None:
            raise FailedPrecondition("the image was returned to the pool")
        return region

    def _cut(self, whole: ByteArray) -> Mapping[str, ByteArray]:
        return {name: whole[start : start + self.sizes[name]] for name, start in self.offsets.items()}


def place_files(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each file if each begins on its own page, and the bytes needed for all files: whole pages, at least
    one.

    Raises:
        InvalidArgument: a size is negative.
    """
    offsets, end = {}, 0
    for name, size in sizes.items():
        if size < 0:
            raise InvalidArgument(f"file {name[:80]!r} has the size {size}")
        offsets[name] = end
        end += -(-size // PAGE) * PAGE
    return offsets, max(end, PAGE)
