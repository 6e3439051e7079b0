"""Live views: the fragments that have changed, for all pages that are open.

A view is made again when something of its model has changed, and now and then by itself: other replicas change models, and bytes that
arrive are no news to anybody else. However many look at it, it is made once. All views together take a small share of a core: what each
costs is measured, and the more it is, the less often it is made. Who looks at many shares that with those alone who look at few: of the
core as of the number of views, each has a part.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from weighbridge.errors import WeighbridgeError
from weighbridge_service.admission.quotas import Shares
from weighbridge_service.catalog.changes import Changes
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.threads import ThreadPool

log = logging.getLogger(__name__)

_SHARE = 0.05
"""Of a core, that all views take together at most."""
_SENDING = 0.0001
"""Seconds that sending a change to one page takes."""
_BUSY_PERIOD = 0.25
"""Seconds between two looks at something that changes by itself."""
_PERIOD = 1.5
"""Seconds between two looks at something else: other replicas may change it."""
_LOOK_SECONDS = 5.0
"""Between two questions whether a page may still be told, while nothing changes."""
_LATE_SECONDS = 10.0
"""After which those who look at a view are told that it cannot be made as yet."""
_MOST_VIEWS = 512
_THREADS = 2
"""Views that are made at one time."""
_LATE = (
    "The store does not answer, or the service has too much to do: what is shown is from before. "
    "/readyz and the log of the service say more."
)
TROUBLE = "trouble"
"""Name of the fragment that says why a view cannot be made."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """A view as HTML.

    Attributes:
        html: by the fragments' names.
        busy: whether it changes by itself.
    """

    html: Mapping[str, str]
    busy: bool


@dataclass
class _Live:
    """A view that some pages show."""

    model: ModelName | None
    make: Callable[[], Fragments]
    quota: str
    viewers: int = 0
    sequence: int = 0
    html: dict[str, str] = field(default_factory=dict)
    changed_at: dict[str, int] = field(default_factory=dict)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    events: dict[int, str] = field(default_factory=dict)

    def take(self, html: Mapping[str, str]) -> None:
        """Note what is different now, and tell those who wait."""
        different = [name for name, text in html.items() if self.html.get(name) != text]
        if not different:
            return
        self.sequence += 1
        for name in different:
            self.html[name] = html[name]
            self.changed_at[name] = self.sequence
        self.events = {}
        self.news.set()
        self.news = asyncio.Event()

    def since(self, sequence: int) -> str:
        """What has changed since then, as the data of an event; made once for all that have come as far."""
        found = self.events.get(sequence)
        if found is None:
            changed = {name: self.html[name] for name, at in self.changed_at.items() if at > sequence}
            found = self.events[sequence] = json.dumps(changed)
        return found


class LiveViews:
    """The views that pages show that are open. To be used on one event loop, that of the HTTP face.

    Args:
        changes: tell what of which model has changed.
        stopping: whether the service goes down.
    """

    def __init__(self, changes: Sequence[Changes], stopping: Callable[[], bool]) -> None:
        self._changes = changes
        self._stopping = stopping
        self._live: dict[Hashable, _Live] = {}
        self._shares: Shares[str] = Shares(_MOST_VIEWS)
        self._threads = ThreadPool("http-views", _THREADS)

    async def follow(
        self,
        key: Hashable,
        model: ModelName | None,
        make: Callable[[], Fragments],
        seen: str,
        ended: Callable[[], bool],
        quota: str = "",
    ) -> AsyncIterator[str]:
        """What changes of a view, each time as JSON: HTML by the names of fragments.

        Args:
            key: of the view; those with the same key share it.
            model: that it is about; None for all.
            make: makes it, in a thread.
            seen: digest of the fragments that the page was made of; see `digest`.
            ended: whether to end; is asked now and then.
            quota: whose views are counted together. One that has too many is told so, as trouble, and nothing else: its browser asks again.
        """
        if key not in self._live and not self._shares.has_room(quota):
            yield json.dumps({TROUBLE: "too many different pages are open to be kept up to date; close some"})
            return
        with self._entered(key, model, make, quota) as live:
            sequence = 0
            while not (ended() or self._stopping()):
                news = live.news
                if live.sequence > sequence:
                    before, sequence = sequence, live.sequence
                    if before or digest(live.html) != seen:
                        yield live.since(before)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await news.wait()

    @contextmanager
    def _entered(
        self, key: Hashable, model: ModelName | None, make: Callable[[], Fragments], quota: str
    ) -> Iterator[_Live]:
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = _Live(model, make, quota)
            self._shares.add(quota)
            live.task = asyncio.get_running_loop().create_task(self._keep(live))
        live.viewers += 1
        try:
            yield live
        finally:
            live.viewers -= 1
            if not live.viewers:
                del self._live[key]
                self._shares.add(live.quota, -1)
                if live.task is not None:
                    live.task.cancel()

    async def _keep(self, live: _Live) -> None:
        """Make a view again and again, as long as somebody looks at it."""
        loop = asyncio.get_running_loop()

        def tell(name: ModelName | None) -> None:
            if live.model is None or name is None or name == live.model:
                loop.call_soon_threadsafe(live.wanted.set)

        with ExitStack() as listening:
            for each in self._changes:
                listening.enter_context(each.listening(tell))
            while not self._stopping():
                live.wanted.clear()
                busy, cost = await self._make(live)
                of = self._shares.of
                least = cost * of.get(live.quota, 0) * len(of) / _SHARE
                await asyncio.sleep(max(_BUSY_PERIOD, least))
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if busy else max(_PERIOD, least)):
                        await live.wanted.wait()
        live.news.set()  # nobody waits for a service that goes down

    async def _make(self, live: _Live) -> tuple[bool, float]:
        """Make a view; gives whether it changes by itself, and what it cost, in seconds of a core."""
        before = live.sequence
        late = asyncio.get_running_loop().call_later(_LATE_SECONDS, live.take, {TROUBLE: _LATE})
        try:
            made, cost = await self._threads.run(partial(_timed, live.make))
        except WeighbridgeError as error:
            live.take({TROUBLE: error.message})
            return False, 0.0
        except Exception:
            log.exception("a page could not be made")
            live.take({TROUBLE: "the service failed; its log says more"})
            return False, 0.0
        finally:
            late.cancel()
        live.take({TROUBLE: "", **made.html})
        return made.busy, cost + (live.viewers * _SENDING if live.sequence > before else 0.0)


def _timed(make: Callable[[], Fragments]) -> tuple[Fragments, float]:
    begun = time.thread_time()
    made = make()
    return made, time.thread_time() - begun


def digest(html: Mapping[str, str]) -> str:
    """What tells one state of all fragments from another."""
    return format(
        hash(tuple((name, html[name]) for name in sorted(html) if name != TROUBLE)) & (2**64 - 1), "x"
    )
