"""Parts of an object: their sizes, and their concurrent transfer within a memory limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Generic, Self, TypeVar

import numpy as np

from weighbridge_storage.stores.objects import Buffer, pieces_of
from weighbridge_storage.stores.s3.settings import LARGEST_PART, MOST_PARTS

T = TypeVar("T")

_GROWTH = 1500
"""A stream's part holds at least this fraction of the bytes before it. 10,000 parts that begin with 16 MiB then hold
6.6 TiB, more than S3's largest object. Up to 23 GiB all parts have one size, which some servers require."""


def size_of(data: object) -> int | None:
    """Bytes in the first argument of `ObjectStore.put`, if it is not a stream."""
    if isinstance(data, bytes | bytearray):
        return len(data)
    return data.nbytes if isinstance(data, memoryview | np.ndarray) else None


def part_size(sent: int, total: int | None, smallest: int) -> int:
    """Size in bytes of an object's next part, such that `MOST_PARTS` are enough.

    Args:
        sent: bytes in the parts before it.
        total: bytes of the object, if known; all parts then have the same size.
        smallest: minimum size of all parts but the last.
    """
    if total is not None:
        return max(smallest, -(-total // MOST_PARTS))
    return max(smallest, min(sent // _GROWTH, LARGEST_PART))


class PartsBudget:
    """A number of bytes that threads share. A request for more bytes than are left waits. A request for more than the
    total waits until no other thread holds any.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        """Wait until these bytes are left, and take them."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + nbytes <= self._nbytes)
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()


class HeldPart:
    """Bytes that count against a budget until they are released.

    Attributes:
        body: the bytes; empty after the last part.
        is_last: whether this is certainly the last part.
    """

    def __init__(self, body: bytearray, is_last: bool, room: int, budget: PartsBudget) -> None:
        self.body = body
        self.is_last = is_last
        self._room = room
        self._budget = budget

    def release(self) -> None:
        """Drop the bytes and return them to the budget. Repeated calls do nothing."""
        self.body = bytearray()
        room, self._room = self._room, 0
        if room:
            self._budget.give_back(room)


class PartReader:
    """Assembles parts by copying pieces, because a stream's piece is valid only until the next piece is taken.

    Args:
        data: as `ObjectStore.put` takes it.
        smallest: size in bytes of the first part.
        budget: the budget of the parts.
    """

    def __init__(self, data: Buffer | Iterable[Buffer], smallest: int, budget: PartsBudget) -> None:
        self._pieces = pieces_of(data)
        self._total = size_of(data)
        self._smallest = smallest
        self._budget = budget
        self._rest = memoryview(b"")
        self._sent = 0

    def next(self) -> HeldPart:
        """The next part. Waits until the budget has space for it.

        Raises:
            InvalidArgument: a piece is not contiguous memory.
            Exception: any error of the stream.
        """
        room = part_size(self._sent, self._total, self._smallest)
        if self._total is not None:
            room = min(room, self._total - self._sent)
        self._budget.take(room)
        try:
            body, done = bytearray(room), 0
            while done < room:
                if not self._rest:
                    piece = next(self._pieces, None)
                    if piece is None:
                        break
                    self._rest = piece
                taken = self._rest[: room - done]
                body[done : done + len(taken)] = taken
                done += len(taken)
                self._rest = self._rest[len(taken) :]
        except BaseException:
            self._budget.give_back(room)
            raise
        del body[done:]
        self._sent += done
        return HeldPart(body, done < room or self._sent == self._total, room, self._budget)


class Sending(Generic[T]):
    """Tasks of one call in a pool that many calls share. All tasks have ended when the context ends."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._tasks: list[Future[T]] = []
        self._failed = threading.Event()

    def submit(self, task: Callable[[], T], ended: Callable[[], None] = lambda: None) -> None:
        """Run a task in the pool, and ``ended`` after it, even if it fails or is cancelled.

        Raises:
            Exception: the error of an earlier task; the new task does not run.
        """
        if self._failed.is_set():
            self.results()
        future = self._pool.submit(task)
        self._tasks.append(future)

        def note(done: Future[T]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._failed.set()
            ended()

        future.add_done_callback(note)

    def results(self) -> list[T]:
        """Results of the tasks, in the order of their submission.

        Raises:
            Exception: the error of a task that failed.
        """
        done, _ = wait(self._tasks, return_when=FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in self._tasks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        wait(self._tasks)
