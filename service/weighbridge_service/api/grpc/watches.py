"""Watches: calls that wait for a ref to move, or for a version to reach a state.

All watches of a model share one poller.

A poller reads the model's head when this process has changed it, and also periodically, to find changes by other
replicas. It asks each question once, and wakes the waiting calls if the answer has changed. Answers from this process's
memory do not wait for a read of the store, because ranks and engines wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from weighbridge._core.resources import RECEIVING, Version, VersionState, why_failed
from weighbridge.errors import (
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.access.peer import Peer
from weighbridge_service.catalog.catalog import AWAY, Catalog
from weighbridge_service.catalog.questions import (
    Answer,
    Found,
    Question,
    Unregistered,
    differs,
    from_memory,
    look,
)
from weighbridge_storage.documents.names import RESERVED_REFS, ModelName, check_ref_name
from weighbridge_storage.threads import ThreadPool

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.45
"""Seconds between two polls while this process does not change the model.

A change by another replica is noticed within this time.
"""
_ABSENT_SECONDS = 2.0
"""Seconds between two polls for a model that is not registered. The interval is longer because callers may ask for any
name, and each poll costs a request to the store."""
_LEAST_SECONDS = 0.02
"""Minimum seconds between two polls."""
_POLLERS = Peer("pollers")
"""Peer under which polls request a thread, so that all pollers together get the share of one peer."""
_PASSING = (*AWAY, ResourceExhausted)
"""Transient errors of a poll, which do not answer a question."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A question whose answer calls wait for. Use it in the loop's thread only.

    Attributes:
        answer: the last answer; None before the first.
        first: futures of new callers, each with the number of the first poll that may answer it, because earlier polls
            may be outdated.
        others: futures of callers that wait for the answer to change.
        askers: number of calls that ask the question.
        outdated: number of the last poll that began before ``answer`` was known.
    """

    answer: Answer | None = None
    first: list[tuple[int, asyncio.Future[Answer]]] = field(default_factory=list)
    others: set[asyncio.Future[Answer]] = field(default_factory=set)
    askers: int = 0
    outdated: int = 0

    def tell_known(self, answer: Found, look: int) -> None:
        """Publish an answer from memory. If it differs, all polls up to number ``look`` are outdated."""
        if differs(self.answer, answer):
            self.outdated = look
        self._tell_others(answer)

    def tell(self, answer: Answer, look: int) -> None:
        """Publish the answer of poll number ``look``."""
        woken = [each for since, each in self.first if since <= look]
        self.first = [each for each in self.first if each[0] > look]
        for future in woken:
            if not future.done():
                future.set_result(answer)
        if look > self.outdated and not isinstance(answer, _PASSING):
            self._tell_others(answer)

    def _tell_others(self, answer: Answer) -> None:
        if differs(self.answer, answer):
            for future in self.others:
                if not future.done():
                    future.set_result(answer)
        self.answer = answer

    def fail(self, error: WeighbridgeError) -> None:
        """Fail all waiting calls."""
        self.fail_others(error)
        for _, future in self.first:
            if not future.done():
                future.set_exception(error)
        self.first = []

    def fail_others(self, error: WeighbridgeError) -> None:
        """Fail the calls that wait for the answer to change."""
        for future in self.others:
            if not future.done():
                future.set_exception(error)

    async def next(self, seen: Answer) -> Answer:
        """The answer, once it differs from ``seen``."""
        if self.answer is not None and differs(seen, self.answer):
            return self.answer
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.others.add(future)
        try:
            return await future
        finally:
            self.others.discard(future)


class _Poller:
    """Polls the head of one model while calls ask about it. Use it in the loop's thread only."""

    def __init__(
        self,
        look: Callable[[list[Question]], Awaitable[dict[Question, Answer]]],
        stopping: threading.Event,
        look_seconds: float,
    ) -> None:
        self.asked: dict[Question, _Asked] = {}
        self._stopping = stopping
        self.wake = asyncio.Event()
        self._look = look
        self._look_seconds = look_seconds
        self._looks = 0
        self._absent = False

    async def first(self, asked: _Asked) -> Answer:
        """The answer of a poll that begins after this call."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked.first.append((self._looks + 1, future))
        self.wake.set()
        return await future

    def tell_known(self, known: Callable[[Question], Found | None]) -> None:
        """Publish answers from memory after a change in this process, and poll again."""
        for question, asked in self.asked.items():
            if (answer := known(question)) is not None:
                asked.tell_known(answer, self._looks)
        self.wake.set()

    async def run(self) -> None:
        """Poll until no call asks a question."""
        while self.asked:
            self.wake.clear()
            self._looks += 1
            begun = time.monotonic()
            last = self._stopping.is_set()
            await self._look_once()
            due = begun + (max(self._look_seconds, _ABSENT_SECONDS) if self._absent else self._look_seconds)
            await asyncio.sleep(_LEAST_SECONDS)
            if last:  # failed only after the last poll, which may have found the awaited answer
                ended = Unavailable("the service is shutting down", fix="try again when it is back")
                for asked in self.asked.values():
                    asked.fail_others(ended)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(due - time.monotonic(), 0.0)):
                    await self.wake.wait()

    async def _look_once(self) -> None:
        this = self._looks
        try:
            answers = await self._look(list(self.asked))
        except _PASSING as error:
            answers = dict.fromkeys(self.asked, error)
        except WeighbridgeError as error:
            self.fail(error)
            return
        except Exception as error:  # calls must not wait for a poller that has ended
            log.exception("polling for %d questions failed", len(self.asked))
            self.fail(WeighbridgeError(f"the service failed: {type(error).__name__}", fix="see the log of the service"))
            return
        self._absent = all(isinstance(answer, Unregistered) for answer in answers.values())
        for question, answer in answers.items():
            if question in self.asked:
                self.asked[question].tell(answer, this)

    def fail(self, error: WeighbridgeError) -> None:
        """Fail all calls that wait for any question."""
        for asked in self.asked.values():
            asked.fail(error)


class Watches:
    """All watches of the service. Use it in the loop's thread only.

    Args:
        catalog: answers the questions.
        threads: thread pool for polls.
        look_seconds: seconds between two polls while this process does not change the model.
    """

    def __init__(self, catalog: Catalog, threads: ThreadPool, look_seconds: float = LOOK_SECONDS) -> None:
        self._catalog = catalog
        self._threads = threads
        self._look_seconds = look_seconds
        self._pollers: dict[ModelName, _Poller] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def listening(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Receive notifications of changes in this process while the block runs. May be entered from any thread."""

        def changed(name: ModelName | None) -> None:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self._changed, name)

        with self._catalog.changes.listening(changed):
            yield

    async def reached(self, name: str, version: str, state: VersionState, seconds: float) -> Version:
        """Wait until a version, by number or ref, has reached a state, and return it.

        Raises:
            NotFound: the model or version does not exist.
            VersionFailed: the version failed instead.
            DeadlineExceeded: the version did not reach the state within ``seconds``.
            Unavailable: the service is shutting down.
        """
        question = Question(version, invisible=True)
        known = from_memory(self._catalog, ModelName.parse(name), question)
        if known is not None and known.version.state.reached(state):
            return known.version
        with self._asking(name, question) as (poller, asked):
            answer = await poller.first(asked)
            try:
                async with asyncio.timeout(seconds):
                    while (there := _in_state(answer, state)) is None:
                        answer = await asked.next(answer)
            except TimeoutError:
                if isinstance(asked.answer, Found):
                    answer = asked.answer  # for the error, which contains the version's error so far
                raise _not_in_time(answer, state) from None
            return there

    async def follow(self, name: str, ref: str, after: int) -> AsyncGenerator[Version | None, None]:
        """Yield the version that a ref names, if it is not ``after``, and each version that it moves to, until the
        service shuts down.

        Args:
            name: name of the model, which need not be registered yet.
            ref: name of the ref, which need not exist yet; `RECEIVING` for the newest version that this process
                receives.
            after: number of the version that the caller saw last; 0 if none.

        Yields:
            None first, if the first poll finds no version other than ``after``; then versions.

        Raises:
            NotFound: the model was deleted.
            InvalidArgument: ``ref`` is not a valid name of a ref.
        """
        if ref not in (*RESERVED_REFS, RECEIVING):
            check_ref_name(ref)  # a wait for an invalid name would never end
        last, registered, begun = after, after > 0, False
        with self._asking(name, Question(ref, invisible=False)) as (poller, asked):
            try:
                answer = await poller.first(asked)
                while True:
                    if not isinstance(answer, Found | NotFound):
                        raise answer
                    if isinstance(answer, Unregistered):
                        if registered:
                            raise answer
                    else:
                        registered = True
                    if isinstance(answer, Found) and answer.version.number != last:
                        last = answer.version.number
                        yield answer.version
                    elif not begun:
                        yield None
                    begun = True
                    answer = await asked.next(answer)
            except Unavailable:
                if not self._catalog.stopping.is_set():
                    raise

    @contextmanager
    def _asking(self, name: str, question: Question) -> Iterator[tuple[_Poller, _Asked]]:
        model = ModelName.parse(name)
        poller = self._pollers.get(model) or self._begin(model)
        asked = poller.asked.setdefault(question, _Asked())
        asked.askers += 1
        try:
            yield poller, asked
        finally:
            asked.askers -= 1
            if not asked.askers:
                del poller.asked[question]

    def _begin(self, model: ModelName) -> _Poller:
        def looked(questions: list[Question]) -> Awaitable[dict[Question, Answer]]:
            return self._threads.run(partial(look, self._catalog, model, questions), _POLLERS)

        poller = self._pollers[model] = _Poller(looked, self._catalog.stopping, self._look_seconds)

        async def poll() -> None:
            try:
                await poller.run()
            finally:
                del self._pollers[model]

        # the task starts after the caller has added its question
        task = asyncio.get_running_loop().create_task(poll())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return poller

    def _changed(self, name: ModelName | None) -> None:
        for model in self._pollers if name is None else self._pollers.keys() & {name}:
            self._pollers[model].tell_known(partial(from_memory, self._catalog, model))


def _in_state(answer: Answer, state: VersionState) -> Version | None:
    """The version, if it has reached a state; None if it may still reach it.

    Raises:
        VersionFailed: the version will not reach the state.
        WeighbridgeError: the answer is an error.
    """
    if isinstance(answer, WeighbridgeError):
        raise answer
    version = answer.version
    if version.state.reached(state):
        return version
    if version.state.given_up or (answer.abandoned and state.stored):
        raise VersionFailed(why_failed(version), details=version.error_details)
    return None


def _not_in_time(answer: Answer, state: VersionState) -> DeadlineExceeded:
    version = answer.version if isinstance(answer, Found) else None
    why = f": {version.error}" if version is not None and version.error else ""
    return DeadlineExceeded(f"{version} was not {state.value} in time{why}")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Merge several generators: yield each item with the index of its source.

    Ends or fails as soon as one source does, and closes all of them.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(1)

    async def bring(index: int, source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                await ready.put((index, item))

    tasks = [asyncio.create_task(bring(index, source)) for index, source in enumerate(sources)]
    ended = asyncio.create_task(_first_end(tasks, ready))
    try:
        while (found := await ready.get()) is not None:
            yield found
        await ended
    finally:
        for task in (*tasks, ended):
            task.cancel()
        await asyncio.gather(*tasks, ended, return_exceptions=True)


async def _first_end(tasks: Sequence[asyncio.Task[None]], ready: asyncio.Queue[Any]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await ready.put(None)
    for task in done:
        task.result()
