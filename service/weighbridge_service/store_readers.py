"""Who is reading which version from the object store, as long as that lasts?"""

from __future__ import annotations

import threading
from collections import Counter

from weighbridge_storage.images import Lease
from weighbridge_storage.names import ModelName


class StoreReaders:
    """The readers of one process. Thread-safe.

    Every reading of a durable version's files (a pull, a restore, an export, a download) begins and ends here. What a version
    looks like, its manifest and its headers, may be read outside of that.
    """

    def __init__(self) -> None:
        self._readers: Counter[tuple[ModelName, int]] = Counter()
        self._lock = threading.Lock()

    def begin(self, model: ModelName, number: int) -> Lease:
        """A reading begins; it ends when the lease is released."""
        key = (model, number)
        with self._lock:
            self._readers[key] += 1

        def end() -> None:
            with self._lock:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]

        return Lease(end)

    @property
    def count(self) -> int:
        """How many readings there are now."""
        with self._lock:
            return self._readers.total()
