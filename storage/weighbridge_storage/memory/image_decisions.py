"""Decision on the placement of an image: in memory, on disk, later, or never.

There are two kinds of space, memory and disk. Two limits apply to each: a budget, and the headroom of the machine. This
module decides from figures. `image_pool` carries out the decision under the lock that guards the figures: it reserves
space before it creates a region.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from weighbridge._core.text.sizes import readable_size
from weighbridge_storage.memory.memory_limits import UNLIMITED

_MOST_WASTE = 4
"""A free region is reused for an image if less than a quarter of it would stay unused."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes of the machine that images can use.

    Attributes:
        available: bytes that are available now.
        most: bytes that would be available if no other process used any.
    """

    available: int
    most: int


@dataclass(frozen=True, slots=True)
class Space:
    """Space for images in memory or on the disk of the scratch folder, in bytes.

    Attributes:
        budget: maximum bytes of all regions together.
        in_use: bytes of regions that are held.
        free: bytes of each region that can be reused, the least recently used first.
        available: bytes that the machine has available now, in addition to the existing regions; reservations for
            regions that are not created yet are subtracted.
        most: bytes that would be available for images if no other process used any.
        own: indexes of the free regions last used by an image of the same model, whose trainers may have them mapped.
    """

    budget: int
    in_use: int
    free: tuple[int, ...]
    available: int
    most: int
    own: frozenset[int] = frozenset()

    @property
    def regions(self) -> int:
        """Bytes of all regions."""
        return self.in_use + sum(self.free)

    @property
    def ceiling(self) -> int:
        """Size of the largest image that can ever fit."""
        return min(self.budget, self.most)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a region of this size can be created now."""
        return self.regions + nbytes <= self.budget and nbytes <= self.available


NO_SPACE = Space(0, 0, (), 0, 0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse the free region at ``index``."""

    in_memory: bool
    index: int


@dataclass(frozen=True, slots=True)
class Make:
    """Create a region."""

    in_memory: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return the ``count`` least recently used free regions to the system, then decide again."""

    in_memory: bool
    count: int


@dataclass(frozen=True, slots=True)
class Later:
    """There is no space now, but there may be when other images are released."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """There would be no space even if all other images were released."""


Decision: TypeAlias = Reuse | Make | GiveBack | Later | Refuse


def decide(nbytes: int, memory: Space, disk: Space) -> Decision:
    """Place an image.

    Tries in this order: reuse a free region in memory; create a new region in memory, after returning free regions if
    necessary; the same on disk.

    Args:
        nbytes: bytes of its region.
        memory: space in memory.
        disk: space on disk; `NO_SPACE` if the image must not be on disk.
    """
    found = offer(nbytes, memory, in_memory=True) or offer(nbytes, disk, in_memory=False)
    if found is not None:
        return found
    return Later() if nbytes <= max(memory.ceiling, disk.ceiling) else Refuse()


def offer(nbytes: int, space: Space, *, in_memory: bool) -> Reuse | Make | GiveBack | None:
    """Way to place an image in one kind of space; None if it does not fit now."""
    fitting = [
        (index not in space.own, capacity, index) for index, capacity in enumerate(space.free) if fits(nbytes, capacity)
    ]
    if fitting:
        return Reuse(in_memory, min(fitting)[-1])
    if space.has_room_for(nbytes):
        return Make(in_memory)
    for count in range(1, len(space.free) + 1):
        if without_free(space, count).has_room_for(nbytes):
            return GiveBack(in_memory, count)
    return None


def fits(nbytes: int, capacity: int) -> bool:
    """Whether a free region is used for an image."""
    return nbytes <= capacity and (capacity - nbytes) * _MOST_WASTE < capacity


def without_free(space: Space, count: int) -> Space:
    """The space after the ``count`` least recently used free regions are returned."""
    gone = sum(space.free[:count])
    return replace(space, free=space.free[count:], available=space.available + gone, own=frozenset())


def shortage(nbytes: int, memory: Space, disk: Space) -> str:
    """Reason why there is no space for an image now, with the figures."""
    return f"{readable_size(nbytes)} do not fit: {_figures('memory', memory)}; {_figures('disk', disk)}"


def _figures(name: str, space: Space) -> str:
    if space.budget == 0:
        return f"none may go to {name}"
    text = f"images hold {readable_size(space.in_use)} of {name}"
    if space.budget < UNLIMITED:
        text += f" (budget: {readable_size(space.budget)})"
    if space.most < UNLIMITED:
        text += f", the machine has {readable_size(space.available + sum(space.free))} more for them"
    return text


def remedy(nbytes: int, memory: Space, disk: Space, *, beside: int = 0) -> str:
    """Advice on how to get space for an image, in memory or on disk.

    Args:
        nbytes: bytes of its region.
        memory: space in memory.
        disk: space on disk.
        beside: bytes of images in memory that stay there.
    """
    if disk.budget < nbytes:
        return f"{more_memory(nbytes + beside, memory)}, or raise --spill-budget"
    return f"{more_memory(nbytes + beside, memory)}, or name a --scratch folder with {readable_size(nbytes)} free"


def more_memory(nbytes: int, memory: Space) -> str:
    """Advice on how to give images this much memory."""
    if nbytes <= memory.most:
        return f"serve with --memory-budget {-(-nbytes >> 20)}MiB or more"
    missing = readable_size(nbytes - memory.most)
    return f"let the service have {missing} more memory (`weighbridge doctor` reports what limits it)"
