"""Allocator of images: in which memory a version is put together, and in which a model's next one probably will be."""

from __future__ import annotations

from collections.abc import Collection

from weighbridge_service.models import RegisteredModel
from weighbridge_service.push.standbys import Standbys
from weighbridge_storage.image_books import ImageOwner
from weighbridge_storage.image_pool import ImagePool, ImageRequest
from weighbridge_storage.images import Image

_IMAGES_OF_A_MODEL = 2


class VersionRequest:
    """Request of one version for its image. Made by `ImageAllocator.request`.

    It keeps its place in the line for memory from the first attempt on, so whoever does not want to wait tries again.
    """

    def __init__(
        self,
        pool: ImagePool,
        standbys: Standbys,
        model: RegisteredModel,
        number: int,
        names: Collection[str],
    ) -> None:
        self._pool = pool
        self._standbys = standbys
        self._model = model.name
        self._owner = ImageOwner(str(model.name), number)
        self._files = [file for file in model.files.files if file.name in names]
        self._sizes = {file.name: file.nbytes for file in self._files}
        self._queued: ImageRequest | None = None
        self._left = False

    def take(self, clients: Collection[str]) -> Image:
        """The image, with the headers of its files written. Makes it if it is this version's turn and there is room.

        Args:
            clients: who pushes the version, as far as they are known.

        Raises:
            ResourceExhausted: there is no room now; or, without a `retry_after`, there never will be.
        """
        image = self._standby(clients) or self._queue()
        try:
            buffers = image.buffers
            for file in self._files:
                buffers[file.name][: len(file.header)] = memoryview(file.header)
        except BaseException:
            image.release()
            raise
        return image

    def _standby(self, clients: Collection[str]) -> Image | None:
        image = self._standbys.take(self._model, self._sizes, clients)
        if image is not None:
            image.assign(self._owner)
            self.leave()
        return image

    def _queue(self) -> Image:
        if self._queued is None:
            # in line before anything is recalled: a smaller version could take what comes back otherwise
            self._queued = self._pool.queue(self._sizes, self._owner)
        try:
            with self._standbys.room_for(self._sizes):
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
        standbys: those that are granted ahead of their versions.
    """

    def __init__(self, pool: ImagePool, standbys: Standbys) -> None:
        self._pool = pool
        self._standbys = standbys

    def request(self, model: RegisteredModel, number: int, names: Collection[str]) -> VersionRequest:
        """Ask for the image of a version.

        Args:
            model: whose version.
            number: of the version.
            names: of those of its files that are put together here.
        """
        return VersionRequest(self._pool, self._standbys, model, number, names)

    def prepare(self, model: RegisteredModel, names: Collection[str], held: int) -> Image | None:
        """The image that a model's next version will probably be written to; None if there is none now.

        A model has two images at most by this: the one that is `live`, and one for the next version.

        Args:
            model: whose version.
            names: of those of its files that were put together here the last time.
            held: images that the model's versions have.
        """
        sizes = {file.name: file.nbytes for file in model.files.files if file.name in names}
        if not sizes:
            return None
        return self._standbys.get(model.name, sizes, may_make=held < _IMAGES_OF_A_MODEL)
