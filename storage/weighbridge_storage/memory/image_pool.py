"""Pool of images. It creates images, reuses their memory, and admits requests for them.

Fresh pages cost far more than the copy into them, so a pool creates regions once and reuses them. It promises only
space that exists: a request for an image is queued and admitted by `image_decisions`, and its space is reserved in the
books before any of it is allocated.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument, ResourceExhausted
from weighbridge_storage.memory import image_decisions
from weighbridge_storage.memory.image_books import HeldFor, Holding, ImageBooks, ImageOwner, PoolUsage
from weighbridge_storage.memory.image_decisions import GiveBack, Headroom, Later, Make, Refuse, Reuse, Space
from weighbridge_storage.memory.images import Image, place_files
from weighbridge_storage.memory.memory_limits import UNLIMITED, read_disk
from weighbridge_storage.memory.regions import Region

log = logging.getLogger(__name__)

_NOBODY = ImageOwner()
_LOOK_SECONDS = 0.25
"""Interval in seconds at which a waiting request checks again, because the pool is not notified when other processes
unmap regions.
"""
_MOST_FREE = 64
"""Maximum number of free regions, regardless of their sizes. Each uses a descriptor and a mapping."""
_LET_GO_SECONDS = 0.5
"""Seconds that other processes have to unmap memory that is returned to the system, before it counts as used by them.
Usually they need milliseconds.
"""
_LET_GO_PAUSE = 0.001
_NAMED = 20
"""Maximum number of holders that an error names."""


def _unlimited() -> Headroom:
    return Headroom(UNLIMITED, UNLIMITED)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request for an image that waits.

    Attributes:
        owner: purpose of the image.
        nbytes: bytes of its region.
        seconds: seconds for which it has waited.
        reason: reason why it waits, with the figures.
    """

    owner: ImageOwner
    nbytes: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"{self.owner} has waited {readable_duration(self.seconds, rough=True)}: {self.reason}"


class ImageRequest:
    """A place in the queue for images, from `ImagePool.queue`. A context manager that leaves the queue at its end.

    Attributes:
        owner: purpose of the image.
        nbytes: bytes of its region.
        reason: reason why the last attempt did not admit it; empty before the first attempt.
        ahead: whether the image is created in advance.
    """

    def __init__(
        self,
        pool: ImagePool,
        sizes: Mapping[str, int],
        owner: ImageOwner,
        *,
        ahead: bool = False,
    ) -> None:
        self.owner = owner
        self.nbytes = place_files(sizes)[1]
        self._since = time.monotonic()
        self.reason = ""
        self.ahead = ahead
        self._pool = pool
        self._sizes = sizes

    @property
    def seconds(self) -> float:
        """Seconds since the request was made."""
        return time.monotonic() - self._since

    def take(self, patience: float = 0.0) -> Image:
        """The image, once the request is first in the queue and there is space. Creates the image outside of the queue,
        because this takes time.

        Args:
            patience: seconds to wait for that. A caller that does not want to wait can call again later; the request
                keeps its place.

        Raises:
            ResourceExhausted: there was no space in time. The message states how much is missing, and the details name
                the holders. Without a `retry_after`, there will never be space.
        """
        return self._pool.fulfil(self, self._sizes, patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.leave(self)


class ImagePool:
    """Creates images and reuses their regions. Thread-safe.

    A region is not zeroed between two uses. This is safe because readers get an image only when it is complete, and an
    image is complete only when headers and tensors have overwritten every byte of every file. A region that another
    process may still write to (`Region.may_change`) is not reused before that process has finished.

    Requests are admitted in the order of arrival: a small request does not overtake a large request that is waiting.

    Args:
        budget_bytes: maximum bytes of shared memory for all images together, including free regions.
        spill_folder: folder for images that do not fit into memory; None to make them wait. It must exist.
        recall: called with each region that other processes may have mapped, before the region is used for another
            model or returned to the system.
        spill_bytes: maximum bytes of all images in this folder.
        memory_room: reads the headroom of the machine; called before each region is created.

    Raises:
        InvalidArgument: a budget is negative.
    """

    def __init__(
        self,
        budget_bytes: int,
        spill_folder: str | os.PathLike[str] | None = None,
        recall: Callable[[Region], None] = lambda _region: None,
        *,
        spill_bytes: int = UNLIMITED,
        memory_room: Callable[[], Headroom] = _unlimited,
    ) -> None:
        for what, nbytes in (("memory", budget_bytes), ("spill", spill_bytes)):
            if nbytes < 0:
                raise InvalidArgument(f"a {what} budget of {nbytes} bytes is negative")
        self._budget = budget_bytes
        self._folder = None if spill_folder is None or not spill_bytes else os.fspath(spill_folder)
        self._spill_bytes = spill_bytes
        self._memory_room = memory_room
        self._changed = threading.Condition()
        self._recall = recall
        self._books = ImageBooks()
        self._images: weakref.WeakSet[Image] = weakref.WeakSet()
        self._line: deque[ImageRequest] = deque()
        self._making: dict[ImageRequest, bool] = {}  # reserved and not created yet; whether in memory

    def queue(self, file_sizes: Mapping[str, int], owner: ImageOwner = _NOBODY) -> ImageRequest:
        """Queue a request for an image that can contain these files.

        Args:
            file_sizes: size of each file in bytes, by name.
            owner: purpose of the image.

        Raises:
            InvalidArgument: a size is negative.
        """
        request = ImageRequest(self, file_sizes, owner)
        with self._changed:
            self._line.append(request)
        return request

    def fulfil(self, request: ImageRequest, sizes: Mapping[str, int], patience: float) -> Image:
        """See `ImageRequest.take`."""
        deadline = time.monotonic() + patience
        while True:
            with self._changed:
                admitted = self._admit(request, deadline)
                if not isinstance(admitted, GiveBack):
                    region = self._enter(admitted, request)
                    break
                struck = self._books.strike_off(admitted.count, in_memory=admitted.in_memory)
            self._close_all(struck)
        self.leave(request)
        if region is None:
            region = self._make(request, in_memory=admitted.in_memory)
        return self._image(region, sizes, request.owner)

    def _enter(self, admitted: Reuse | Make, request: ImageRequest) -> Region | None:
        """Enter a decision into the books. Returns the region if it exists already."""
        if isinstance(admitted, Reuse):
            return self._books.reuse(admitted.index, in_memory=admitted.in_memory)
        self._books.reserve(request.nbytes, in_memory=admitted.in_memory)
        self._making[request] = admitted.in_memory
        return None

    def _admit(self, request: ImageRequest, deadline: float) -> Reuse | Make | GiveBack:
        """Wait until a request is first in the queue and there is space for it, or returning free regions would free
        enough space.
        """
        while True:
            memory, disk = self._spaces(request)
            decision = image_decisions.decide(request.nbytes, memory, disk)
            ahead = self._line[0] if self._line and self._line[0] is not request else None
            if isinstance(decision, Refuse):
                raise ResourceExhausted(
                    (
                        f"{request.owner} can never be received here: "
                        f"{image_decisions.shortage(request.nbytes, memory, disk)}"
                    ),
                    fix=image_decisions.remedy(request.nbytes, memory, disk),
                )
            if ahead is not None:
                reason = f"{ahead.owner}, which needs {readable_size(ahead.nbytes)}, comes first"
            elif isinstance(decision, Later):
                reason = image_decisions.shortage(request.nbytes, memory, disk)
            else:
                return decision
            if not request.reason and request in self._line:
                log.info("%s waits for an image: %s", request.owner, reason)
            request.reason = reason
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._no_room(request, memory, disk)
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _no_room(self, request: ImageRequest, memory: Space, disk: Space) -> ResourceExhausted:
        return ResourceExhausted(
            f"{request.owner} found no room within {readable_duration(request.seconds, rough=True)}: {request.reason}",
            details=[str(holding) for holding in self._holdings()[:_NAMED]],
            fix=(
                "wait until another version is done, abort one, or release tensors that were "
                "pulled without a copy; if that goes on, "
            )
            + image_decisions.remedy(request.nbytes, memory, disk, beside=memory.in_use),
            retry_after=_LOOK_SECONDS,
        )

    def leave(self, request: ImageRequest) -> None:
        """Remove a request from the queue. Repeated calls do nothing."""
        with self._changed:
            if request in self._line:
                self._line.remove(request)
                self._changed.notify_all()

    def make_ahead(self, file_sizes: Mapping[str, int], owner: ImageOwner, count: int) -> int:
        """Allocate memory for ``count`` images of a model, including existing images, as long as this does not take
        memory from other models.

        Args:
            file_sizes: sizes of the images' files in bytes, by name.
            owner: owner with the model's name.
            count: number of images.

        Returns:
            Number of images for which memory is allocated.
        """
        request = ImageRequest(self, file_sizes, owner, ahead=True)
        while True:
            with self._changed:
                there = self._images_of(owner.model, request.nbytes)
                if there >= count or self._line or not self._memory().has_room_for(request.nbytes):
                    return there
                self._enter(Make(in_memory=True), request)
            self._image(self._make(request, in_memory=True), file_sizes, owner).release()

    def images_of(self, model: str, file_sizes: Mapping[str, int]) -> int:
        """Number of images of a model for which memory is allocated, including existing images."""
        with self._changed:
            return self._images_of(model, place_files(file_sizes)[1])

    def _images_of(self, model: str, nbytes: int) -> int:
        self._books.look_again()
        held = [each for each in self._holdings() if each.owner.model == model and each.in_memory]
        return self._books.ahead(nbytes, model) + len(held)

    def trim(self) -> int:
        """Return all free regions to the system. Returns their bytes."""
        with self._changed:
            self._books.look_again()
            struck = self._books.strike_all_off()
        return self._close_all(struck)

    def usage(self) -> PoolUsage:
        """Current contents and totals of the pool."""
        with self._changed:
            self._books.look_again()
            return self._books.usage()

    def holdings(self) -> list[Holding]:
        """All images with their holders, the longest held first."""
        with self._changed:
            self._books.look_again()
            return self._holdings()

    def waiting(self) -> list[Waiting]:
        """Requests that wait for an image, in the order of the queue. Requests that were not tried yet are omitted."""
        with self._changed:
            return [
                Waiting(request.owner, request.nbytes, request.seconds, request.reason)
                for request in self._line
                if request.reason
            ]

    def spaces(self) -> tuple[Space, Space]:
        """Space for images in memory and on disk.

        Raises:
            WeighbridgeError: the spill folder's file system cannot be read.
        """
        with self._changed:
            self._books.look_again()
            return self._memory(), self._disk()

    def _holdings(self) -> list[Holding]:
        found = [
            Holding(request.owner, request.nbytes, in_memory, HeldFor.MAKING, request.seconds)
            for request, in_memory in self._making.items()
        ]
        images = [image.holding for image in self._images]
        found += [holding for holding in images if holding.use is not HeldFor.MAPPED]  # these are in the books
        found += self._books.mapped
        return sorted(found, key=lambda holding: -holding.seconds)

    def _spaces(self, request: ImageRequest) -> tuple[Space, Space]:
        memory, nbytes = self._memory_for(request), request.nbytes
        if image_decisions.offer(nbytes, memory, in_memory=True):
            return memory, image_decisions.NO_SPACE
        if nbytes <= memory.ceiling and any(making.ahead for making in self._making):
            # a region that is being created in advance is ready in a moment, and can then be reused or returned: memory
            # is worth this wait
            return memory, image_decisions.NO_SPACE
        return memory, self._disk()

    def _memory_for(self, request: ImageRequest) -> Space:
        """Space in memory for an image. The reuse of a free region does not need headroom, so the limits, which take a
        millisecond to read, are not read for it.
        """
        self._books.look_again()
        there = self._books.space(in_memory=True, budget=self._budget, room=Headroom(0, 0), model=request.owner.model)
        offer = image_decisions.offer(request.nbytes, there, in_memory=True)
        return there if isinstance(offer, Reuse) else self._memory()

    def _memory(self) -> Space:
        return self._books.space(in_memory=True, budget=self._budget, room=self._memory_room())

    def _disk(self) -> Space:
        if self._folder is None:
            return image_decisions.NO_SPACE
        disk = read_disk(self._folder)
        available = min(disk.available, self._memory_room().available) if disk.in_memory else disk.available
        usage = self._books.usage()
        room = Headroom(available, available + usage.disk_in_use + usage.disk_free)
        return self._books.space(in_memory=False, budget=self._spill_bytes, room=room)

    def _image(self, region: Region, sizes: Mapping[str, int], owner: ImageOwner) -> Image:
        if region.model != owner.model:
            if region.model:
                self._recall(region)  # writers of one model's versions must not write to another's
            region.model = owner.model
        image = Image(region, sizes, owner, self._give_back)
        with self._changed:
            self._images.add(image)
        return image

    def _make(self, request: ImageRequest, *, in_memory: bool) -> Region:
        """Create a region for which space is already reserved. Takes the lock only for the books."""
        left = request.nbytes

        def allocated(nbytes: int) -> None:
            nonlocal left
            left -= nbytes
            with self._changed:
                self._books.allocated(nbytes, in_memory=in_memory)

        region: Region | None = None
        try:
            region = Region(request.nbytes, None if in_memory else self._folder, allocated)
        finally:
            with self._changed:
                del self._making[request]
                if region is not None:
                    self._books.made()
                else:
                    self._books.allocated(left, in_memory=in_memory)
                    self._books.forget(request.nbytes, in_memory=in_memory)
                    self._changed.notify_all()
        return region

    def _give_back(self, image: Image, region: Region) -> None:
        holding = image.holding
        if region.was_left_open and not region.in_memory:
            # not every file system knows which processes have a file open; its space is freed when the last reader
            # closes it
            with self._changed:
                self._books.forget(region.capacity, in_memory=False)
                self._changed.notify_all()
            region.close()
            return
        with self._changed:
            free = self._books.put_back(region, holding)
            surplus = self._books.strike_surplus_off(_MOST_FREE)
            self._changed.notify_all()
        if not free:
            self._recall(region)
        self._close_all(surplus)

    def _close_all(self, regions: list[Region]) -> int:
        """Close regions. Returns the number of their bytes. A region that other processes keep mapped stays in the
        books until they unmap it.
        """
        for region in regions:
            self._recall(region)
        until = time.monotonic() + _LET_GO_SECONDS
        closed = 0
        for region in regions:
            if self._is_let_go(region, until):
                region.close()
                closed += region.capacity
            else:
                with self._changed:
                    self._books.take_back(region)
        return closed

    @staticmethod
    def _is_let_go(region: Region, until: float) -> bool:
        if not region.in_memory:
            # not every file system knows which processes have a file open; its space is freed with the last reader
            return True
        region.left_open()
        while region.in_use_elsewhere():
            if time.monotonic() > until:
                return False
            time.sleep(_LET_GO_PAUSE)
        return True
