"""Allocator of images: memory in which versions are assembled, some of it allocated ahead of a model's next version."""

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
"""The image of the `live` version, and one for the next version."""


class VersionRequest:
    """Request of one version for its image. Created by `ImageAllocator.request`.

    It keeps its place in the queue for memory from the first attempt on, so a caller that does not wait can retry.
    """

    def __init__(self, pool: ImagePool, model: RegisteredModel, number: int, names: Collection[str]) -> None:
        self._pool = pool
        self._owner = ImageOwner(str(model.name), number)
        self._files = [file for file in model.files.files if file.name in names]
        self._sizes = _sizes(model, names)
        self._queued: ImageRequest | None = None
        self._left = False

    def take(self) -> Image:
        """The image, with the headers of its files written.

        Allocates it if it is this version's turn and there is memory.

        Raises:
            ResourceExhausted: memory is short now; without a `retry_after`, the image will never fit.
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
            if self._left:  # no retry follows `leave`, and requests behind this one would wait
                self._pool.leave(self._queued)

    def leave(self) -> None:
        """Give up the place in the queue. Callable from any thread; repeated calls do nothing."""
        self._left = True
        if self._queued is not None:
            self._pool.leave(self._queued)


class ImageAllocator:
    """Allocator of the images of versions. Thread-safe.

    Args:
        pool: the pool from which images are taken.
    """

    def __init__(self, pool: ImagePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._making: set[ModelName] = set()

    def request(self, model: RegisteredModel, number: int, names: Collection[str]) -> VersionRequest:
        """Request the image of a version.

        Args:
            model: the model.
            number: number of the version.
            names: names of the files that this replica assembles.
        """
        return VersionRequest(self._pool, model, number, names)

    def make_ahead(self, model: RegisteredModel, names: Collection[str]) -> int:
        """Allocate memory for the version after the one that is being pushed.

        Returns the number of images that fit into the memory.

        Args:
            model: the model.
            names: names of the files that this replica assembles.
        """
        return self._pool.make_ahead(_sizes(model, names), ImageOwner(str(model.name)), IMAGES_OF_A_MODEL)

    def begin_ahead(self, model: RegisteredModel, names: Collection[str]) -> None:
        """Run `make_ahead` in the background, unless the model has enough images already."""
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
                log.info("no memory was allocated in advance for %s: %s", model.name, error.message)
            finally:
                with self._lock:
                    self._making.discard(model.name)

        try:
            threading.Thread(target=make, name=f"ahead-{model.name}", daemon=True).start()
        except RuntimeError as error:  # too many threads: the next push allocates its memory when it needs it
            log.info("no memory was allocated in advance for %s: %s", model.name, error)
            with self._lock:
                self._making.discard(model.name)


def _sizes(model: RegisteredModel, names: Collection[str]) -> dict[str, int]:
    """Sizes of some of a model's files, in bytes, by name."""
    return {file.name: file.nbytes for file in model.files.files if file.name in names}
