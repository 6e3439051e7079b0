"""Store whose small calls have a deadline: while a store hangs, callers wait only seconds, and their threads do not
hang.

System calls on a network file system hang as long as its server is unreachable, and S3 clients retry for minutes. Here
the calls run in separate threads, and a caller gets an error after the timeout (``patience``). From then on a breaker
(`breaker`) makes calls fail at once. Users' calls do not test whether the store is back: one thread of the guard polls
it until it responds.

The guard does not retry or undo anything: a write whose caller got `DeadlineExceeded` may still be carried out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from weighbridge_storage.stores.breaker import Breaker
from weighbridge_storage.stores.objects import (
    Buffer,
    ObjectStore,
    PutMode,
    check_folder_prefix,
    check_prefix,
)
from weighbridge_storage.stores.outcomes import unknown
from weighbridge_storage.threads import ThreadPool

log = logging.getLogger(__name__)

DEFAULT_PATIENCE = 5.0
"""Default timeout of a small call, in seconds."""
_THREADS = 32
_PAGE = 1000
"""Number of names of a listing that one call fetches. S3 returns as many in one response."""
_BYTES_PER_SECOND = 1 << 20
"""A write gets an additional second for each MiB."""
_ASK_EVERY = 1.0
"""Seconds between two polls of a silent store."""
_NOTHING = "probe/nothing"
"""A key that never has an object."""
_FIX = "see whether the object store can be reached from the service; calls go through again as soon as it answers"

T = TypeVar("T")
Count = Callable[[str, float, bool], None]


class GuardedStore(ObjectStore):
    """A store with a deadline on small calls, and a breaker.

    Transfers of large objects, such as files of weights, are not guarded.

    `get`, `size`, `modified_ms`, `read_range`, `delete`, each page of a listing, and `put` of `bytes` are guarded.
    Streams, opens, copies, and `put` of anything else are passed to the store in the caller's thread.

    In addition to the store's errors, every guarded call may raise Unavailable (the call was not made, or a read timed
    out), and DeadlineExceeded (`put` or `delete` timed out; it may have been carried out, or may still be carried out).

    Args:
        store: the store; it is closed with this one.
        patience: timeout of a call, and duration of silence after which calls fail at once, in seconds.
        threads: maximum number of concurrent calls. Further calls wait for a thread, within their deadline.
        count: called after each guarded call with the operation (read, write or list), the seconds it took, and whether
            it failed.
    """

    def __init__(
        self,
        store: ObjectStore,
        patience: float = DEFAULT_PATIENCE,
        *,
        threads: int = _THREADS,
        count: Count = lambda *_: None,
    ) -> None:
        self._store = store
        self._count = count
        self._patience = patience
        self._threads = ThreadPool("store-call", threads)
        self._lock = threading.Lock()
        self._breaker = Breaker(patience)
        self._asking = False
        self._closing = threading.Event()

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the store has not responded, so that calls fail at once; 0 while it responds."""
        with self._lock:
            return self._breaker.silence(time.monotonic())

    def get(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get`."""
        return self._read(f"reading {key}", lambda: self._store.get(key))

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return self._read(f"reading the size of {key}", lambda: self._store.size(key))

    def modified_ms(self, key: str) -> int:
        """See `ObjectStore.modified_ms`."""
        return self._read(f"reading the time of {key}", lambda: self._store.modified_ms(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        return self._read(f"reading a part of {key}", lambda: self._store.read_range(key, start, length))

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        """See `ObjectStore.put`.

        Only `bytes` are guarded: other data could change under a write that outlives its caller.
        """
        if not isinstance(data, bytes):
            return self._store.put(key, data, mode=mode)
        seconds = self._patience + len(data) / _BYTES_PER_SECOND
        return self._write(f"writing {key}", lambda: self._store.put(key, data, mode=mode), seconds)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._write(f"deleting {key}", lambda: self._store.delete(key), self._patience)

    def list(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list`. Each page has its own deadline."""
        return self._pages(f"listing {check_prefix(prefix)!r}", lambda: self._store.list(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.folders`. Each page has its own deadline."""
        return self._pages(f"listing {check_folder_prefix(prefix)!r}", lambda: self._store.folders(prefix))

    @property
    def is_near(self) -> bool:
        """See `ObjectStore.is_near`."""
        return self._store.is_near

    def stream(self, key: str) -> Iterator[bytes | memoryview]:
        """See `ObjectStore.stream`; unguarded."""
        return self._store.stream(key)

    def open(self, key: str) -> int | None:
        """See `ObjectStore.open`; unguarded."""
        return self._store.open(key)

    def presigned_url(self, key: str, seconds: int) -> str | None:
        """See `ObjectStore.presigned_url`."""
        return self._store.presigned_url(key, seconds)

    def copy(self, source: str, target: str) -> None:
        """See `ObjectStore.copy`; unguarded."""
        self._store.copy(source, target)

    def discard_unfinished(self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None) -> int:
        """See `ObjectStore.discard_unfinished`; unguarded."""
        return self._store.discard_unfinished(prefix, older_than_s, only=only)

    def close(self) -> None:
        """See `ObjectStore.close`. Calls that hang are not waited for."""
        self._closing.set()
        self._threads.close()
        self._store.close()

    def _pages(self, what: str, begin: Callable[[], Iterator[str]]) -> Iterator[str]:
        names = self._read(what, begin, "list")
        # if a thread hangs in the iterator, no other thread uses it again: the error ends this iterator, too
        while page := self._read(what, lambda: list(islice(names, _PAGE)), "list"):
            yield from page

    def _read(self, what: str, do: Callable[[], T], operation: str = "read") -> T:
        with self._counted(operation):
            return self._ask(what, do, self._patience, changes=False)

    def _write(self, what: str, do: Callable[[], T], seconds: float) -> T:
        with self._counted("write"):
            return self._ask(what, do, seconds, changes=True)

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        asked, failed = time.monotonic(), False
        try:
            yield
        except (Unavailable, DeadlineExceeded):
            failed = True
            raise
        finally:
            self._count(operation, time.monotonic() - asked, failed)

    def _ask(self, what: str, do: Callable[[], T], seconds: float, *, changes: bool) -> T:
        """Result of a call within ``seconds``.

        ``changes`` states whether the call may have an effect even if it times out.
        """
        asked = time.monotonic()
        with self._lock:
            if self._breaker.is_open:
                self._ask_again()
                raise _not_tried(what, _silent(self._breaker.silence(asked)))
        try:
            call = self._threads.submit(partial(self._observed, do, asked))
        except ResourceExhausted as error:
            raise _not_tried(what, error.message) from error
        with suppress(TimeoutError):
            call.exception(asked + seconds - time.monotonic())  # not `result`: a call may raise a TimeoutError itself
        if call.done():
            try:
                return call.result()
            finally:
                del call  # its error's traceback leads back here
        with self._lock:
            self._breaker = self._breaker.given_up(asked, time.monotonic())
            is_silent = self._breaker.is_open
            if is_silent:
                self._ask_again()
        if call.cancel():
            busy = (
                f"no thread was free for it for {readable_duration(seconds, rough=True)}: too many "
                "calls wait for the object store"
            )
            raise _not_tried(what, _silent(seconds) if is_silent else busy)
        if changes:
            raise unknown(what, _silent(seconds))
        raise Unavailable(f"{what} failed: {_silent(seconds)}", fix=_FIX)

    def _observed(self, do: Callable[[], T], asked: float) -> T:
        """Result of a call. Records its outcome in the breaker."""
        away = False
        try:
            return do()
        except (Unavailable, DeadlineExceeded):
            away = True
            raise
        finally:
            with self._lock:
                self._breaker = self._breaker.ended(asked, time.monotonic(), away=away)

    def _ask_again(self) -> None:
        """Start to poll a silent store, unless a thread already polls it. The caller holds the lock."""
        if not self._asking and not self._closing.is_set():
            threading.Thread(target=self._watch, name="store-watch", daemon=True).start()
            self._asking = True  # after start(): if no thread can be started now, the next call tries again

    def _watch(self) -> None:
        begun = time.monotonic()
        log.error("%s: calls that need it fail at once until it does", _silent(self._patience))
        while True:
            try:
                self._observed(partial(self._store.size, _NOTHING), time.monotonic())
            except NotFound:
                pass
            except Exception as error:
                log.debug("the object store still does not answer: %s", error)
            with self._lock:
                if self._closing.is_set() or not self._breaker.is_open:
                    self._asking = False
                    break
            self._closing.wait(_ASK_EVERY)
        if not self._closing.is_set():
            log.info(
                "the object store answers again, after %s",
                readable_duration(time.monotonic() - begun + self._patience, rough=True),
            )


def _silent(seconds: float) -> str:
    return f"the object store has not answered for {readable_duration(seconds, rough=True)}"


def _not_tried(what: str, why: str) -> Unavailable:
    return Unavailable(f"{what} was not tried: {why}", fix=_FIX)
