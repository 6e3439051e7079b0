"""In which buffers is a version put together, and who may still be using them?

An image holds the bytes of a version's files as they will finally stand, each file from a page boundary on, in one region
of shared memory or of an unlinked file on local disk. Fresh pages cost far more than the copy into them, so a pool makes
regions once and uses them again.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from weighbridge.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from weighbridge_storage.file_bytes import FileBytes, MappedBytes, Place
from weighbridge_storage.objects import ByteArray
from weighbridge_storage.regions import PAGE, Region

_MOST_WASTE = 4
"""A free region is used for an image if less than a quarter of it would lie idle."""


class Lease:
    """Keeps what somebody reads as it is until it is released; a context manager."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the lease. Doing it again does nothing."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def together(*leases: Lease) -> Lease:
    """Several leases as one."""

    def end() -> None:
        for lease in leases:
            lease.release()

    return Lease(end)


class Image:
    """Buffers for the files of one version. Made by `ImagePool.acquire`.

    Whoever acquired it holds it until `release`; others take a `lease` for as long as they use it. When the last of them is
    done, the region goes back to the pool, and arrays over it that somebody kept will show another version's bytes.

    Attributes:
        sizes: size of each file in bytes.
        offsets: byte of the region where each file starts; multiples of `PAGE`.
    """

    def __init__(self, region: Region, sizes: Mapping[str, int], done: Callable[[Region], None]) -> None:
        self.sizes: Mapping[str, int] = MappingProxyType(dict(sizes))
        self.offsets: Mapping[str, int] = MappingProxyType(place_files(sizes)[0])
        self._region: Region | None = region
        self._done = done
        self._lock = threading.Lock()
        self._holders = 0
        self._frozen = False
        self._owner = self.lease()

    @property
    def buffers(self) -> Mapping[str, ByteArray]:
        """A writable array of bytes for each file. What it holds at first is undefined.

        Raises:
            FailedPrecondition: the image is frozen, or was given back.
        """
        if self._frozen:
            raise FailedPrecondition("the image is complete and can no longer be written")
        return self._cut(self._live().writable)

    @property
    def read_only_buffers(self) -> Mapping[str, ByteArray]:
        """An array of bytes for each file that cannot be written through.

        Raises:
            FailedPrecondition: the image was given back.
        """
        return self._cut(self._live().readable)

    @property
    def region(self) -> Region:
        """Where it lies; valid as long as the image is held.

        Raises:
            FailedPrecondition: the image was given back.
        """
        return self._live()

    @property
    def file_bytes(self) -> dict[str, FileBytes]:
        """Each file, for reading.

        Raises:
            FailedPrecondition: the image was given back.
        """
        region = self._live()

        def place(name: str) -> Place:
            reopen = functools.partial(region.reopen, writable=False)
            return Place(
                region.key, region.capacity, self.offsets[name], reopen, region.in_memory, region.left_open
            )

        return {name: MappedBytes(data, place(name)) for name, data in self._cut(region.readable).items()}

    def freeze(self) -> None:
        """Refuse `buffers` from now on. Writable arrays that were handed out before stay writable."""
        self._frozen = True

    def lease(self) -> Lease:
        """Keep the image from going back to the pool.

        Raises:
            FailedPrecondition: it already has.
        """
        with self._lock:
            self._live()
            self._holders += 1
        return Lease(self._drop)

    def release(self) -> None:
        """End the acquirer's own hold. Doing it again does nothing."""
        self._owner.release()

    def _drop(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            region, self._region = self._region, None
        if region is not None:
            self._done(region)

    def _live(self) -> Region:
        region = self._region
        if region is None:
            raise FailedPrecondition("the image was given back to the pool")
        return region

    def _cut(self, whole: ByteArray) -> Mapping[str, ByteArray]:
        return {name: whole[start : start + self.sizes[name]] for name, start in self.offsets.items()}


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What a pool holds, in bytes of regions, and what it has done so far.

    Attributes:
        memory_in_use: shared memory of images that somebody holds.
        memory_free: shared memory of regions that wait to be used again.
        disk_in_use: likewise on disk.
        disk_free: likewise on disk.
        made: regions made.
        reused: images that got a region made for an earlier one.
    """

    memory_in_use: int
    memory_free: int
    disk_in_use: int
    disk_free: int
    made: int
    reused: int


class ImagePool:
    """Makes images, and uses their regions again. Thread-safe.

    A region is not zeroed between two uses. That is safe because nobody sees an image before it is complete, and complete
    means that headers and tensors were written over every byte of every file. One that another process could still write to
    is not used again before that process has let go of it.

    Args:
        budget_bytes: most shared memory for all images together, free regions included.
        spill_folder: where images go that are over the budget; None to refuse them. It must be there.
        recall: is called with each region that is to be used again, or given back to the system, and that other processes may
            have mapped.

    Raises:
        InvalidArgument: the budget is negative.
    """

    def __init__(
        self,
        budget_bytes: int,
        spill_folder: str | os.PathLike[str] | None = None,
        recall: Callable[[Region], None] = lambda _region: None,
    ) -> None:
        if budget_bytes < 0:
            raise InvalidArgument(f"a memory budget of {budget_bytes} bytes is negative")
        self._budget = budget_bytes
        self._folder = None if spill_folder is None else os.fspath(spill_folder)
        self._lock = threading.Lock()
        self._recall = recall
        self._free: list[Region] = []  # the longest unused first
        self._written: list[Region] = []  # nobody's image any more, but other processes still use them
        self._memory = 0  # of all regions, of regions being made too
        self._disk = 0
        self._made = 0
        self._reused = 0

    def acquire(self, file_sizes: Mapping[str, int], *, may_spill: bool = True) -> Image:
        """An image with room for these files.

        In this order: a free region in memory; a new one in memory, for which free ones are given up if need be; a free
        one on disk; a new one on disk. Making one takes time (pages are faulted in at about 0.3 GB/s where the machine has
        not used them before) and keeps no other caller from the pool.

        Args:
            file_sizes: size of each file in bytes, by name.
            may_spill: whether it may lie on disk.

        Raises:
            InvalidArgument: a size is negative.
            ResourceExhausted: over the budget, and no room on disk or no folder for it, or it may not lie there.
        """
        _, total = place_files(file_sizes)
        given_up: list[Region] = []
        with self._lock:
            self._take_back()
            region = self._take_free(total, in_memory=True)
            in_memory = region is not None or self._reserve_memory(total, given_up)
            if not in_memory:
                may_spill = may_spill and self._folder is not None
                region = self._take_free(total, in_memory=False) if may_spill else None
                if not may_spill:
                    raise ResourceExhausted(
                        f"an image of {total} bytes does not fit: {self._memory} of {self._budget} bytes are in use",
                        fix="wait until another version is done, raise the memory budget or set a spill folder",
                    )
                if region is None:
                    self._disk += total
            if region is not None:
                self._reused += 1
        self._close_all(given_up)
        if region is None:
            region = self._make(total, in_memory=in_memory)
        return Image(region, file_sizes, self._give_back)

    def reuse(self, file_sizes: Mapping[str, int]) -> Image | None:
        """An image as `acquire` gives it, in a free region in memory; None if there is none that fits."""
        _, total = place_files(file_sizes)
        with self._lock:
            self._take_back()
            region = self._take_free(total, in_memory=True)
            if region is None:
                return None
            self._reused += 1
        return Image(region, file_sizes, self._give_back)

    def fits(self, file_sizes: Mapping[str, int]) -> bool:
        """Whether `acquire` would give an image in memory now."""
        _, total = place_files(file_sizes)
        with self._lock:
            self._take_back()
            free = [region for region in self._free if region.in_memory]
            return (
                self._memory - sum(region.capacity for region in free) + total <= self._budget
                or self._find_free(total, in_memory=True) is not None
            )

    def trim(self) -> int:
        """Give all free regions back to the system; returns their bytes."""
        with self._lock:
            self._take_back()
            given_up = [self._discard(region) for region in list(self._free)]
        return self._close_all(given_up)

    def usage(self) -> PoolUsage:
        """What the pool holds now."""
        with self._lock:
            self._take_back()
            memory_free = sum(r.capacity for r in self._free if r.in_memory)
            disk_free = sum(r.capacity for r in self._free if not r.in_memory)
            return PoolUsage(
                memory_in_use=self._memory - memory_free,
                memory_free=memory_free,
                disk_in_use=self._disk - disk_free,
                disk_free=disk_free,
                made=self._made,
                reused=self._reused,
            )

    def _make(self, capacity: int, *, in_memory: bool) -> Region:
        """A region for which room is reserved already. Takes the lock only for the books."""
        folder = None if in_memory else self._folder
        try:
            try:
                region = Region(capacity, folder)
            except ResourceExhausted:
                # Free regions of other sizes may be what fills the disk.
                if self.trim() == 0:
                    raise
                region = Region(capacity, folder)
        except BaseException:
            with self._lock:
                self._forget(capacity, in_memory=in_memory)
            raise
        with self._lock:
            self._made += 1
        return region

    def _take_free(self, total: int, *, in_memory: bool) -> Region | None:
        best = self._find_free(total, in_memory=in_memory)
        if best is not None:
            self._free.remove(best)
        return best

    def _find_free(self, total: int, *, in_memory: bool) -> Region | None:
        fitting = [
            r
            for r in self._free
            if r.in_memory is in_memory
            and total <= r.capacity
            and (r.capacity - total) * _MOST_WASTE < r.capacity
        ]
        return min(fitting, key=lambda r: r.capacity, default=None)

    def _reserve_memory(self, total: int, given_up: list[Region]) -> bool:
        """Enter a region into the books if the budget allows it, and add the free ones it displaces to ``given_up``."""
        free = [r for r in self._free if r.in_memory]
        if self._memory - sum(r.capacity for r in free) + total > self._budget:
            return False
        for region in free:
            if self._memory + total <= self._budget:
                break
            given_up.append(self._discard(region))
        self._memory += total
        return True

    def _discard(self, region: Region) -> Region:
        """Strike a free region off the books. Closing it takes time, and is done without the lock."""
        self._free.remove(region)
        self._forget(region.capacity, in_memory=region.in_memory)
        return region

    def _forget(self, capacity: int, *, in_memory: bool) -> None:
        if in_memory:
            self._memory -= capacity
        else:
            self._disk -= capacity

    def _give_back(self, region: Region) -> None:
        if region.was_left_open and not region.in_memory:
            # not every file system can say who has a file open; its room comes back when the last reader has gone
            with self._lock:
                self._forget(region.capacity, in_memory=False)
            region.close()
            return
        with self._lock:
            self._written.append(region)
            self._take_back()
            in_use = region in self._written
        if in_use:
            self._recall(region)

    def _take_back(self) -> None:
        """Use those regions again that no other process can write to any more."""
        written = [region for region in self._written if region.in_use_elsewhere()]
        self._free += [region for region in self._written if region not in written]
        self._written = written

    def _close_all(self, regions: list[Region]) -> int:
        """Close regions; returns their bytes."""
        for region in regions:
            self._recall(region)
            region.close()
        return sum(region.capacity for region in regions)


def place_files(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where files start when each begins on a page of its own, and the bytes needed for all: whole pages, at least one.

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
