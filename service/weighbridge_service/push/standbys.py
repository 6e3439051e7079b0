"""Standby images: granted ahead of the versions they are for, so that trainers can map them while they train."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from weighbridge.errors import WeighbridgeError
from weighbridge_service.push.mappings import Mappings
from weighbridge_storage.image_books import ImageOwner
from weighbridge_storage.image_pool import ImagePool
from weighbridge_storage.images import Image
from weighbridge_storage.lru import Cache
from weighbridge_storage.names import ModelName
from weighbridge_storage.regions import Region

log = logging.getLogger(__name__)

_RETURN_SECONDS = 2.0
"""How long a push waits for memory that was lent ahead, before it takes other memory."""
_RETURN_PAUSE = 0.005
_MADE_SECONDS = 10.0
"""How long a push waits for memory that is just being made ahead, to be given it, before it takes other memory."""
_MAKE_SECONDS = 1.0
"""How long a model that has been given memory ahead waits for some that others will let go of, before it is given more."""
_REMEMBERED = 1000
"""Models of which is remembered that they have been given some."""


class Standbys:
    """At most one image for each model, waiting for its next version. Thread-safe.

    Args:
        images: where they come from, and go back to.
        mappings: who has them mapped.
    """

    def __init__(self, images: ImagePool, mappings: Mappings) -> None:
        self._images = images
        self._mappings = mappings
        self._lock = threading.Lock()
        self._waiting: dict[ModelName, Image] = {}
        self._making: set[ModelName] = set()
        self._wanting = 0  # versions that look for room now
        self._given: Cache[bool] = Cache(_REMEMBERED)  # models that new memory was made for
        self._asked: dict[ModelName, float] = {}  # since when there has been none

    def get(self, model: ModelName, sizes: Mapping[str, int], *, may_make: bool) -> Image | None:
        """The image that the next version will get if it can; None if there is none now.

        Args:
            model: whose version.
            sizes: of its files.
            may_make: whether new memory may be taken for it.
        """
        with self._lock:
            if model in self._making or self._wanting:
                return None
            waiting = self._waiting.get(model)
            if waiting is not None and waiting.sizes == sizes:
                return waiting
            self._making.add(model)
            asked = self._asked.setdefault(model, time.monotonic())
            given = self._given.get(model) is not None
            soon = given and time.monotonic() - asked < _MAKE_SECONDS
        try:
            image = self._images.reuse(sizes, ImageOwner(str(model)))
            if image is None and may_make and not soon and self._images.fits(sizes):
                # fresh memory takes seconds; whoever has asked asks again
                threading.Thread(
                    target=self._make, args=(model, sizes), name=f"standby-{model}", daemon=True
                ).start()
                return None
        except BaseException:
            self._enter(model, None)
            raise
        self._enter(model, image)
        return image

    def _make(self, model: ModelName, sizes: Mapping[str, int]) -> None:
        made: Image | None = None
        try:
            made = self._images.acquire(sizes, ImageOwner(str(model)), may_spill=False)
        except WeighbridgeError as error:
            log.info("no memory was made ahead for %s: %s", model, error.message)
        finally:
            with self._lock:
                self._given.put(model, True)
            self._enter(model, made)

    def _enter(self, model: ModelName, image: Image | None) -> None:
        """What was to be made is there, or was not made. It is not kept while a version looks for room."""
        with self._lock:
            self._making.discard(model)
            unwanted = image
            if image is not None and not self._wanting:
                unwanted = self._waiting.get(model)
                self._waiting[model] = image
                self._asked.pop(model, None)
        if unwanted is not None:
            self._drop(unwanted)

    @contextmanager
    def waiting(self, image: Image | None) -> Iterator[Image | None]:
        """Gives the image, which no version takes meanwhile; None if one has it already."""
        with self._lock:
            yield image if any(image is each for each in self._waiting.values()) else None

    def take(self, model: ModelName, sizes: Mapping[str, int], clients: Collection[str]) -> Image | None:
        """The model's image, for a version that begins now; None if there is none, or it is for other files.

        If none of those who push has it mapped, others have it, who may stand still and never let go of it: then it is one that they
        have let go of, or None.

        Args:
            model: whose version.
            sizes: of its files.
            clients: who pushes it, as far as they are known.
        """
        with self._lock:
            image = self._waiting.pop(model, None)
            self._asked.pop(model, None)
        if image is not None and image.sizes != sizes:
            self._drop(image)
            return None
        holders = self._mappings.writers(image.region) if image is not None else set()
        if image is None or not holders or not holders.isdisjoint(clients):
            return image
        self._drop(image)
        deadline = time.monotonic() + _RETURN_SECONDS
        while (
            image := self._images.reuse(sizes, ImageOwner(str(model)))
        ) is None and time.monotonic() < deadline:
            time.sleep(_RETURN_PAUSE)
        return image

    @contextmanager
    def room_for(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """Give images back if a version would otherwise find no room in memory, and keep any from being made until it has it."""
        with self._lock:
            self._wanting += 1
        try:
            made_by = time.monotonic() + _MADE_SECONDS
            returned_by = 0.0
            while not self._images.fits(sizes):
                with self._lock:
                    waiting, self._waiting = list(self._waiting.values()), {}
                    # what is being made holds memory already, and can be given back once it is there
                    making = bool(self._making) and time.monotonic() < made_by
                for image in waiting:
                    self._drop(image)
                    returned_by = time.monotonic() + _RETURN_SECONDS
                if not making and time.monotonic() > returned_by:
                    break
                time.sleep(_RETURN_PAUSE)
            yield
        finally:
            with self._lock:
                self._wanting -= 1

    def drop(self, region: Region) -> None:
        """Give an image back that nobody waits for any more."""
        with self._lock:
            found = [model for model, image in self._waiting.items() if image.region is region]
            dropped = [self._waiting.pop(model) for model in found]
        for image in dropped:
            self._drop(image)

    def _drop(self, image: Image) -> None:
        self._mappings.recall(image.region)
        image.release()
