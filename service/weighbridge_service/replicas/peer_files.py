"""Files that other replicas own. They are sources for reading a version before it is durable.

They are read in blocks through the same cache, and with the same read-ahead, as files of a remote store. If the owner
does not return a block, there are three cases: another replica has taken its files over and returns the block; the
version has become durable, and the block is read from the store at the same offset; or the version has failed, and the
reader gets its error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from weighbridge._transport import rpc
from weighbridge.errors import Unavailable, WeighbridgeError
from weighbridge_service.plan.declarations import Home
from weighbridge_service.replicas.links import Links
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.documents.names import ModelName, version_key
from weighbridge_storage.memory.file_bytes import FileBytes
from weighbridge_storage.stores.objects import ObjectStore

_PATIENCE_SECONDS = 30.0


class PeerFiles:
    """Opens files that other replicas own. Thread-safe.

    Args:
        links: connections to other replicas.
        cache: cache of blocks.
        store: store that contains the files once the version is durable.
        patience_seconds: seconds for which a block is retried while its owner does not respond and the version is
            neither durable nor failed.

    Attributes:
        bytes_read: number of bytes read from other replicas.
    """

    def __init__(
        self,
        links: Links,
        cache: BlockCache,
        store: ObjectStore,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._links = links
        self._cache = cache
        self._store = store
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self.bytes_read = 0

    def open(
        self,
        model: ModelName,
        number: int,
        claim: str,
        owner_of: Callable[[str], Home],
        sizes: Mapping[str, int],
        is_durable: Callable[[], bool],
    ) -> dict[str, FileBytes]:
        """Open files of a version that is ready.

        Args:
            model: name of the model.
            number: number of the version.
            claim: claim of the agreement between its replicas.
            owner_of: returns the replica that currently owns a file.
            sizes: sizes in bytes of the files to open.
            is_durable: returns whether the version can now be read from the store. Raises VersionFailed if the version
                has failed.

        Raises:
            ResourceExhausted, Unavailable: the cache does not have space for them.
        """
        fetch = partial(self._fetch, model, number, claim, owner_of, is_durable)
        return dict(self._cache.open(f"{model}@{number}", sizes, fetch, {}))

    def _fetch(
        self,
        model: ModelName,
        number: int,
        claim: str,
        owner_of: Callable[[str], Home],
        is_durable: Callable[[], bool],
        file: str,
        offset: int,
        length: int,
    ) -> bytes:
        patience = rpc.Patience(self._patience_seconds)
        while True:
            owner = owner_of(file)
            try:
                data = self._links.read_file(owner, (str(model), number, claim), file, offset, length)
            except WeighbridgeError as error:
                if is_durable():
                    return self._store.read_range(version_key(model, number, file), offset, length)
                if not patience.wait():
                    raise Unavailable(
                        f"{file} of {model}@{number} cannot be read from the replica {owner}: {error.message}",
                        fix="try again when that replica is back, or when the version is durable",
                    ) from error
            else:
                with self._lock:
                    self.bytes_read += length
                return data
