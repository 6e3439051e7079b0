"""In which memory is a version put together, and in which will a model's next one probably be?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weighbridge.errors import FailedPrecondition
from weighbridge_service.catalog import Catalog, ModelState
from weighbridge_service.models import RegisteredModel
from weighbridge_service.standbys import Standbys
from weighbridge_storage.image_books import ImageOwner
from weighbridge_storage.image_pool import ImagePool
from weighbridge_storage.images import Image

_IMAGES_OF_A_MODEL = 2


class VersionImages:
    """Gives versions their images. Thread-safe.

    Args:
        catalog: which versions there are.
        pool: where images come from.
        standbys: those that are lent ahead of their versions.
        patience: how many seconds a version waits for an image.
    """

    def __init__(self, catalog: Catalog, pool: ImagePool, standbys: Standbys, patience: float) -> None:
        self._catalog = catalog
        self._pool = pool
        self._standbys = standbys
        self._patience = patience

    def acquire(
        self, model: RegisteredModel, number: int, names: Sequence[str], clients: Collection[str]
    ) -> Image:
        """An image for a version that begins now, with the headers of its files written. Waits for its turn and for room.

        Args:
            model: whose version.
            number: of the version.
            names: of those of its files that are put together here.
            clients: who pushes it, as far as they are known.

        Raises:
            ResourceExhausted: there was no room in time, or there never can be.
        """
        files = [file for file in model.files.files if file.name in set(names)]
        sizes = {file.name: file.nbytes for file in files}
        owner = ImageOwner(str(model.name), number)
        image = self._standbys.take(model.name, sizes, clients)
        if image is not None:
            image.assign(owner)
        else:
            # in line before anything is recalled: a smaller version could take what comes back otherwise
            with self._pool.queue(sizes, owner) as request, self._standbys.room_for(sizes):
                image = request.take(self._patience)
        try:
            buffers = image.buffers
            for file in files:
                buffers[file.name][: len(file.header)] = memoryview(file.header)
        except BaseException:
            image.release()
            raise
        return image

    def prepare(self, state: ModelState, client_id: str) -> Image | None:
        """The image that a model's next version will probably be written to; None if there is none now.

        A model has two images at most by this: the one that is `live`, and one for the next version.

        Args:
            state: the model's.
            client_id: who would write to it.

        Raises:
            FailedPrecondition: the client has not pushed the model lately. Who could keep the memory open without ever pushing
                would make the versions of others fail.
        """
        with self._catalog.changed:
            versions = [live.receiving for live in state.versions.values()]
        if not any(receiving.takes_part(client_id) for receiving in reversed(versions)):
            raise FailedPrecondition(
                f"{state.model.name}: memory is prepared only for those who have just pushed a version"
            )
        held = sum(receiving.image is not None for receiving in versions)
        sizes = dict(state.model.files.file_sizes)
        return self._standbys.get(state.model.name, sizes, may_make=held < _IMAGES_OF_A_MODEL)
