"""``python -m benchmarks.counted_service serve ...``: the service, with a count of what it reads from its store and
writes to it.

The arguments are those of ``weighbridge``. The count is that of the port `ObjectStore`, so it is the same for every
store. Each line on standard input is answered by one line on standard output: the counts since the start as JSON,
``requests`` and ``bytes``, of all objects and of heads and their history alone.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from weighbridge_service import core
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.objects import Buffer, ObjectStore, PutMode, pieces_of


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests to a store and the bytes of objects that they moved.

    Attributes:
        requests: all requests.
        read, written: bytes of all objects.
        head_read, head_written: bytes of heads, and of what they point to.
    """

    requests: int
    read: int
    written: int
    head_read: int
    head_written: int

    def minus(self, other: Counts) -> Counts:
        """Difference of two counts."""
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{name: mine[name] - theirs[name] for name in mine})


_REQUESTS = frozenset({"size", "list", "folders", "delete", "copy", "discard_unfinished"})
"""Methods of a store that move no bytes to the service or from it."""


def _is_head(key: str) -> bool:
    parts = key.split("/")
    return parts[0] == "models" and (parts[-1] == "head.json" or "history" in parts[3:])


class CountingStore:
    """Another store, and how much it is asked for.

    Objects that are mapped count nothing: they are looked at later, or never.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        with self._lock:
            return Counts(**{name: self._counted[name] for name in Counts.__slots__})

    def with_time_limit(self, seconds: float) -> CountingStore:
        """As `ObjectStore` says; it counts to the same."""
        limited = CountingStore(self._store.with_time_limit(seconds))
        limited._lock, limited._counted = self._lock, self._counted
        return limited

    def __getattr__(self, name: str) -> Any:
        if name in _REQUESTS:
            self._count(requests=1)
        return getattr(self._store, name)

    def get(self, key: str) -> tuple[bytes, str]:
        """As `ObjectStore` says."""
        content, etag = self._store.get(key)
        self._count(key, requests=1, read=len(content))
        return content, etag

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        """As `ObjectStore` says."""

        def counted() -> Iterator[memoryview]:
            for piece in pieces_of(data):
                self._count(key, written=len(piece))
                yield piece

        self._count(requests=1)
        return self._store.put(key, counted(), mode=mode)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """As `ObjectStore` says."""
        self._count(key, requests=1, read=length)
        return self._store.read_range(key, start, length)

    def stream(self, key: str) -> Iterator[bytes | memoryview]:
        """As `ObjectStore` says."""
        self._count(requests=1)
        for piece in self._store.stream(key):
            self._count(key, read=len(piece))
            yield piece

    def _count(self, key: str = "", *, requests: int = 0, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self._counted.update(requests=requests, read=read, written=written)
            if _is_head(key):
                self._counted.update(head_read=read, head_written=written)


def _answer(stores: Iterable[CountingStore]) -> None:
    for _ in sys.stdin:
        [store] = stores
        print(json.dumps(asdict(store.counts)), flush=True)


def main() -> None:
    """Serve until it is ended."""
    stores: list[CountingStore] = []

    def counting(location: str) -> CountingStore:
        stores.append(CountingStore(open_store(location)))
        return stores[-1]

    core.open_store = counting  # type: ignore[attr-defined, assignment]
    threading.Thread(target=partial(_answer, stores), daemon=True).start()
    from weighbridge._cli import main as weighbridge

    weighbridge()


if __name__ == "__main__":
    main()
