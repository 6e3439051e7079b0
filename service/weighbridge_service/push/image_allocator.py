"""Allocator of images: in which memory a version is put together, and which is made ahead of a model's next one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from weighbridge.errors import WeighbridgeError
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.memory.image_books import ImageOwner
from weighbridge_storage.memory.image_pool import ImagePool, ImageRequest
from weighbridge_storage.memory.images import Image

log = logging.getLogger(__name__)

IMAGES_OF_A_MODEL = 2
"""The one that is `live`, and one for the next version."""


class VersionRequest:
    """Request of one version for its image. Made by `ImageAllocator.request`.

    It keeps its place in the line for memory from the first attempt on, so whoever does not want to wait tries again.
    """

    def __init__(self, pool: ImagePool, model: RegisteredModel, number: int, names: Collection[str]) -> None:
        self._pool = pool
        self._owner = ImageOwner(str(model.name), number)
        self._files = [file for file in model.files.files if file.name in names]
        self._sizes = _sizes(model, names)
        self._queued: ImageRequest | None = None
        self._left = False

    def take(self) -> Image:
        """The image, with the headers of its files written. Makes it if it is this version's turn and there is room.

        Raises:
            ResourceExhausted: there is no room now; or, without a `retry_after`, there never will be.
        """
        image = self._queue()
        try:
            buffers = image.buffers
            for file in self._files:
                buffers[file.name][: len(file.header)] = memoryview(file.header)
        except BaseException:
            image.release()
            raise
        return image

    def _queue(self) -> Image:
        if self._queued is None:
            self._queued = self._pool.queue(self._sizes, self._owner)
        try:
            return self._queued.take()
        finally:
            if self._left:  # meanwhile: nobody would try again, and those behind would wait for ever
                self._pool.leave(self._queued)

    def leave(self) -> None:
        """Give the place in the line up; from any thread. Doing it again does nothing."""
        self._left = True
        if self._queued is not None:
            self._pool.leave(self._queued)


class ImageAllocator:
    """Gives versions their images. Thread-safe.

    Args:
        pool: where images come from.
    """

    def __init__(self, pool: ImagePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._making: set[ModelName] = set()

    def request(self, model: RegisteredModel, number: int, names: Collection[str]) -> VersionRequest:
        """Ask for the image of a version.

        Args:
            model: whose version.
            number: of the version.
            names: of those of its files that are put together here.
        """
        return VersionRequest(self._pool, model, number, names)

    def make_ahead(self, model: RegisteredModel, names: Collection[str]) -> int:
        """Have memory for the version after the one that is being pushed; how many images there is memory for.

        Args:
            model: whose version.
            names: of those of its files that are put together here.
        """
        return self._pool.make_ahead(_sizes(model, names), ImageOwner(str(model.name)), IMAGES_OF_A_MODEL)

    def begin_ahead(self, model: RegisteredModel, names: Collection[str]) -> None:
        """`make_ahead`, in the background, if there is not enough already."""
        if self._pool.images_of(str(model.name), _sizes(model, names)) >= IMAGES_OF_A_MODEL:
            return
        with self._lock:
            if model.name in self._making:
                return
            self._making.add(model.name)

        def make() -> None:
            try:
                self.make_ahead(model, names)
            except WeighbridgeError as error:
                log.info("no memory was made ahead for %s: %s", model.name, error.message)
            finally:
                with self._lock:
                    self._making.discard(model.name)

        try:
            threading.Thread(target=make, name=f"ahead-{model.name}", daemon=True).start()
        except RuntimeError as error:  # there are too many: the next push makes it when it needs it
            log.info("no memory was made ahead for %s: %s", model.name, error)
            with self._lock:
                self._making.discard(model.name)


def _sizes(model: RegisteredModel, names: Collection[str]) -> dict[str, int]:
    """Sizes of some of a model's files."""
    return {file.name: file.nbytes for file in model.files.files if file.name in names}
