"""Decision on an image: in memory, on disk, later, or never.

Room is of two kinds, memory and disk, and each is bounded twice: by a budget, and by what the machine can give. What is decided
here from figures, `image_pool` carries out, under the lock that guards the figures: room is reserved before it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from weighbridge._core.text.sizes import readable_size
from weighbridge_storage.memory.memory_limits import UNLIMITED

_MOST_WASTE = 4
"""A free region is used for an image if less than a quarter of it would lie idle."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the machine has for images.

    Attributes:
        available: bytes that it can give now.
        most: bytes that it could give if nobody else took any.
    """

    available: int
    most: int


@dataclass(frozen=True, slots=True)
class Space:
    """Memory, or the disk of the scratch folder, as far as images are concerned. In bytes.

    Attributes:
        budget: most for all regions together.
        in_use: of regions that somebody has.
        free: of each region that waits to be used again, the longest unused first.
        available: what the machine can give now, beyond the regions that there are; what is reserved and not made yet is taken
            off.
        most: what the machine could give to images if nobody else took any.
        own: indexes of those free regions that lay under an image of the same model before: its trainers may have them mapped.
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
        """The largest image that could ever be had."""
        return min(self.budget, self.most)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a region of this size can be made now."""
        return self.regions + nbytes <= self.budget and nbytes <= self.available


NO_SPACE = Space(0, 0, (), 0, 0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Take a region that is there: the one at ``index`` of the free ones."""

    in_memory: bool
    index: int


@dataclass(frozen=True, slots=True)
class Make:
    """Make a region."""

    in_memory: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give the ``count`` longest unused free regions back to the system, then decide again."""

    in_memory: bool
    count: int


@dataclass(frozen=True, slots=True)
class Later:
    """There is no room now; there may be when others are done."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """There would be no room if everybody else was done."""


Decision: TypeAlias = Reuse | Make | GiveBack | Later | Refuse


def decide(nbytes: int, memory: Space, disk: Space) -> Decision:
    """What becomes of an image.

    In this order: a free region in memory; a new one there, for which free ones are given up if need be; the same on disk.

    Args:
        nbytes: bytes of its region.
        memory: room in memory.
        disk: room on disk; `NO_SPACE` if it may not lie there.
    """
    found = offer(nbytes, memory, in_memory=True) or offer(nbytes, disk, in_memory=False)
    if found is not None:
        return found
    return Later() if nbytes <= max(memory.ceiling, disk.ceiling) else Refuse()


def offer(nbytes: int, space: Space, *, in_memory: bool) -> Reuse | Make | GiveBack | None:
    """How an image is had in one kind of room; None if it is not now."""
    fitting = [
        (index not in space.own, capacity, index)
        for index, capacity in enumerate(space.free)
        if fits(nbytes, capacity)
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
    """The room when the ``count`` longest unused free regions have been given back."""
    gone = sum(space.free[:count])
    return replace(space, free=space.free[count:], available=space.available + gone, own=frozenset())


def shortage(nbytes: int, memory: Space, disk: Space) -> str:
    """Why an image is not had now, with the figures."""
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
    """What to change so that there is room for an image, in memory or on disk.

    Args:
        nbytes: bytes of its region.
        memory: room in memory.
        disk: room on disk.
        beside: bytes of images in memory that stay there.
    """
    if disk.budget < nbytes:
        return f"{more_memory(nbytes + beside, memory)}, or raise --spill-budget"
    return f"{more_memory(nbytes + beside, memory)}, or name a --scratch folder with {readable_size(nbytes)} free"


def more_memory(nbytes: int, memory: Space) -> str:
    """What to change so that images can have so much memory."""
    if nbytes <= memory.most:
        return f"serve with --memory-budget {-(-nbytes >> 20)}MiB or more"
    missing = readable_size(nbytes - memory.most)
    return f"let the service have {missing} more memory (`weighbridge doctor` says what limits it)"
