"""Bookkeeping of a pool of images: its regions, their holders, and the reservations for regions that are not created
yet.

The caller holds a lock. So this module never waits, and its only system calls check whether another process still has a
region mapped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge_storage.memory.image_decisions import Headroom, Space, fits
from weighbridge_storage.memory.regions import Region


@dataclass(frozen=True, slots=True)
class ImageOwner:
    """Purpose of an image.

    Attributes:
        model: ``namespace/name``; empty if not known.
        number: number of the version; 0 if the image is created in advance for the model's next version.
    """

    model: str = ""
    number: int = 0

    def __str__(self) -> str:
        if not self.model:
            return "an image"
        return f"{self.model}@{self.number}" if self.number else f"the next version of {self.model}"


class HeldFor(StrEnum):
    """Reason why an image is held."""

    MAKING = "making"
    """Reserved. The system is allocating its pages."""
    RECEIVING = "receiving"
    """Being filled by a push."""
    READY = "ready"
    """Complete. Kept until it is durable and a newer version is ready."""
    READERS = "readers"
    """No longer kept for the version itself, but readers still hold it."""
    MAPPED = "mapped"
    """Not held in this process, but another process on this machine still has it mapped."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A region that is held.

    Attributes:
        owner: its current or last purpose.
        nbytes: its size.
        in_memory: whether it is shared memory, as opposed to a file.
        use: reason why it is held.
        seconds: seconds for which it has had that owner; for `HeldFor.MAPPED`, seconds for which it has not been held.
        readers: number of holds of readers and writers.
        reading_seconds: age of the oldest of these holds; 0 if there are none.
    """

    owner: ImageOwner
    nbytes: int
    in_memory: bool
    use: HeldFor
    seconds: float
    readers: int = 0
    reading_seconds: float = 0.0

    def __str__(self) -> str:
        place = "memory" if self.in_memory else "disk"
        seconds = self.reading_seconds if self.use is HeldFor.READERS else self.seconds
        why = {
            HeldFor.MAKING: "being made",
            HeldFor.RECEIVING: "being received",
            HeldFor.READY: "ready; kept until it is durable and a newer version is ready",
            HeldFor.READERS: f"kept by {self.readers} readers",
            HeldFor.MAPPED: "still mapped by another process",
        }[self.use]
        return (
            f"{self.owner}: {readable_size(self.nbytes)} of {place}, {why}, for "
            f"{readable_duration(seconds, rough=True)}"
        )


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Contents of a pool, in bytes of regions, and totals since its creation.

    Attributes:
        memory_in_use: shared memory of regions that are held.
        memory_free: shared memory of regions that wait to be reused.
        disk_in_use: disk space of regions that are held.
        disk_free: disk space of regions that wait to be reused.
        made: number of regions created.
        reused: number of images that reused the region of an earlier image.
    """

    memory_in_use: int
    memory_free: int
    disk_in_use: int
    disk_free: int
    made: int
    reused: int


class ImageBooks:
    """The regions of one pool, by state. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[Region] = []  # the least recently used first
        # regions that are not held but that other processes still use: the region, its last holding, and the time of
        # release
        self._mapped: list[tuple[Region, Holding, float]] = []
        self._regions = {True: 0, False: 0}  # bytes in memory and on disk, including regions being created
        self._unmade = {True: 0, False: 0}  # bytes of these that are not allocated yet
        self._made = 0
        self._reused = 0

    def space(self, *, in_memory: bool, budget: int, room: Headroom, model: str = "") -> Space:
        """Space of one kind, memory or disk.

        Args:
            in_memory: whether memory is meant.
            budget: maximum bytes of all regions.
            room: headroom of the machine.
            model: model of the image.
        """
        regions = self._of(in_memory)
        free = tuple(region.capacity for region in regions)
        return Space(
            budget=budget,
            in_use=self._regions[in_memory] - sum(free),
            free=free,
            available=max(room.available - self._unmade[in_memory], 0),
            most=room.most,
            own=frozenset(i for i, region in enumerate(regions) if model and region.model == model),
        )

    def ahead(self, nbytes: int, model: str) -> int:
        """Number of free regions in memory that a model's next image can use without taking them from another model."""
        free = self._of(in_memory=True)
        return sum(fits(nbytes, region.capacity) and region.model in ("", model) for region in free)

    def reserve(self, nbytes: int, *, in_memory: bool) -> None:
        """Reserve bytes for a region that is about to be created."""
        self._regions[in_memory] += nbytes
        self._unmade[in_memory] += nbytes

    def allocated(self, nbytes: int, *, in_memory: bool) -> None:
        """Record that bytes of a region that is being created are allocated: they now reduce the machine's headroom."""
        self._unmade[in_memory] -= nbytes

    def made(self) -> None:
        """Record that a region has been created."""
        self._made += 1

    def forget(self, nbytes: int, *, in_memory: bool) -> None:
        """Remove a region that was returned to the system or could not be created."""
        self._regions[in_memory] -= nbytes

    def reuse(self, index: int, *, in_memory: bool) -> Region:
        """Use one of the free regions."""
        region = self._of(in_memory)[index]
        self._free.remove(region)
        self._reused += 1
        return region

    def strike_off(self, count: int, *, in_memory: bool) -> list[Region]:
        """Remove the least recently used free regions. The caller closes them, which takes time."""
        return [self._strike_off(region) for region in self._of(in_memory)[:count]]

    def strike_surplus_off(self, most: int) -> list[Region]:
        """Remove the least recently used free regions until at most ``most`` are left. The caller closes them."""
        return [self._strike_off(region) for region in self._free[: max(len(self._free) - most, 0)]]

    def strike_all_off(self) -> list[Region]:
        """Remove all free regions. The caller closes them."""
        return [self._strike_off(region) for region in list(self._free)]

    def _strike_off(self, region: Region) -> Region:
        self._free.remove(region)
        self.forget(region.capacity, in_memory=region.in_memory)
        return region

    def put_back(self, region: Region, holding: Holding) -> bool:
        """Record that a region is no longer held. Returns whether it can already be reused.

        Args:
            region: the region.
            holding: its last holding.
        """
        self._mapped.append((region, holding, time.monotonic()))
        self.look_again()
        return region in self._free

    def take_back(self, region: Region) -> None:
        """Put back a region that was removed but cannot be returned to the system yet, because other processes still
        have it mapped.
        """
        self._regions[region.in_memory] += region.capacity
        holding = Holding(ImageOwner(region.model), region.capacity, region.in_memory, HeldFor.MAPPED, 0.0)
        self._mapped.append((region, holding, time.monotonic()))

    def look_again(self) -> None:
        """Free the regions that other processes have unmapped."""
        used = {id(region) for region, _, _ in self._mapped if region.in_use_elsewhere()}
        self._free += [region for region, _, _ in self._mapped if id(region) not in used]
        self._mapped = [entry for entry in self._mapped if id(entry[0]) in used]

    @property
    def mapped(self) -> list[Holding]:
        """Regions that are not held but that other processes still have mapped."""
        now = time.monotonic()
        return [
            replace(holding, use=HeldFor.MAPPED, seconds=now - since, readers=0, reading_seconds=0.0)
            for _, holding, since in self._mapped
        ]

    def usage(self) -> PoolUsage:
        """Current contents and totals."""
        memory, disk = (sum(region.capacity for region in self._of(kind)) for kind in (True, False))
        return PoolUsage(
            memory_in_use=self._regions[True] - memory,
            memory_free=memory,
            disk_in_use=self._regions[False] - disk,
            disk_free=disk,
            made=self._made,
            reused=self._reused,
        )

    def _of(self, in_memory: bool) -> Sequence[Region]:
        return [region for region in self._free if region.in_memory is in_memory]
