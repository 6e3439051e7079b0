"""Images for tests that write or read one outside of a push."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge_storage.memory.image_books import ImageOwner
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.images import Image

_NOBODY = ImageOwner()


def acquire(
    pool: ImagePool, file_sizes: Mapping[str, int], owner: ImageOwner = _NOBODY, *, patience: float = 0.0
) -> Image:
    """An image with room for these files; raises ResourceExhausted if there is none within so many seconds, or others
    wait for it.
    """
    with pool.queue(file_sizes, owner) as request:
        return request.take(patience)
