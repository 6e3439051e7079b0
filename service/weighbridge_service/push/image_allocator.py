"""Allocator of images: in which memory a version is put together, and in which a model's next one probably will be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weighbridge_service.models import RegisteredModel
from weighbridge_service.push.standbys import Standbys
from weighbridge_storage.images import Image, ImagePool

_IMAGES_OF_A_MODEL = 2


class ImageAllocator:
    """Gives versions their images. Thread-safe.

    Args:
        pool: where images come from.
        standbys: those that are granted ahead of their versions.
    """

    def __init__(self, pool: ImagePool, standbys: Standbys) -> None:
        self._pool = pool
        self._standbys = standbys

    def acquire(self, model: RegisteredModel, names: Sequence[str], clients: Collection[str]) -> Image:
        """An image for a version that begins now, with the headers of its files written. Makes it if there is room for it.

        Args:
            model: whose version.
            names: of those of its files that are put together here.
            clients: who pushes it, as far as they are known.

        Raises:
            ResourceExhausted: there is no room now.
        """
        files = [file for file in model.files.files if file.name in set(names)]
        sizes = {file.name: file.nbytes for file in files}
        image = self._standbys.take(model.name, sizes, clients)
        if image is None:
            with self._standbys.room_for(sizes):
                image = self._pool.acquire(sizes)
        try:
            buffers = image.buffers
            for file in files:
                buffers[file.name][: len(file.header)] = memoryview(file.header)
        except BaseException:
            image.release()
            raise
        return image

    def prepare(self, model: RegisteredModel, held: int) -> Image | None:
        """The image that a model's next version will probably be written to; None if there is none now.

        A model has two images at most by this: the one that is `live`, and one for the next version.

        Args:
            model: whose version.
            held: images that the model's versions have.
        """
        sizes = dict(model.files.file_sizes)
        return self._standbys.get(model.name, sizes, may_make=held < _IMAGES_OF_A_MODEL)
