"""Live views: sends changed fragments to all open pages.

A view is rebuilt when its model has changed, and also periodically: other replicas change models, and arriving bytes
cause no notification. All pages that show the same view share one rebuild. All views together use at most a small share
of a core: the service measures the cost of each rebuild, and rebuilds an expensive view less often. Both that share and
the number of views are divided evenly among quotas (identities or hosts), so a viewer with many open views only slows
down these views.
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
"""Maximum share of a core that all views use together."""
_SENDING = 0.0001
"""Seconds that it takes to send a change to one page."""
_BUSY_PERIOD = 0.25
"""Seconds between two rebuilds of a view that changes without notification."""
_PERIOD = 1.5
"""Seconds between two rebuilds of any other view, which other replicas may have changed."""
_LOOK_SECONDS = 5.0
"""While nothing changes, seconds between two checks whether a page may still receive fragments."""
_LATE_SECONDS = 10.0
"""If a view cannot be rebuilt for this many seconds, its pages report that."""
_MOST_VIEWS = 512
_THREADS = 2
"""Maximum number of views that are rebuilt at the same time."""
_LATE = (
    "The store does not answer, or the service is overloaded: this page shows an earlier state. "
    "See /readyz and the log of the service."
)
TROUBLE = "trouble"
"""Name of the fragment with the reason why a view cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """A view as HTML.

    Attributes:
        html: HTML of each fragment, by its name.
        busy: whether the view changes without notification.
    """

    html: Mapping[str, str]
    busy: bool


@dataclass
class _Live:
    """A view that open pages show."""

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
        """Store the fragments that differ, and wake the waiting streams."""
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
        """The fragments that have changed since ``sequence``, as the data of an event; cached for all streams at the
        same ``sequence``.
        """
        found = self.events.get(sequence)
        if found is None:
            changed = {name: self.html[name] for name, at in self.changed_at.items() if at > sequence}
            found = self.events[sequence] = json.dumps(changed)
        return found


class LiveViews:
    """The views of open pages. For use on one event loop, that of the HTTP server.

    Args:
        changes: notifications of changed models.
        stopping: returns whether the service is shutting down.
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
        """Yield the changed fragments of a view, each time as a JSON object from fragment names to HTML.

        Args:
            key: key of the view; pages with the same key share it.
            model: the model that the view shows; None for all models.
            make: builds the view; called in a thread.
            seen: digest of the fragments that the page was rendered from; see `digest`.
            ended: returns whether to end the stream; called every few seconds while nothing changes.
            quota: identity or host whose views are counted together. If it has too many, the stream yields only a
                `TROUBLE` fragment and ends; the browser reconnects later.
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
        """Rebuild a view repeatedly until the task is cancelled (no page shows the view) or the service stops."""
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
        live.news.set()  # wake the streams, so that they end with the service

    async def _make(self, live: _Live) -> tuple[bool, float]:
        """Rebuild a view. Returns whether it changes without notification, and its cost in CPU seconds."""
        before = live.sequence
        late = asyncio.get_running_loop().call_later(_LATE_SECONDS, live.take, {TROUBLE: _LATE})
        try:
            made, cost = await self._threads.run(partial(_timed, live.make))
        except WeighbridgeError as error:
            live.take({TROUBLE: error.message})
            return False, 0.0
        except Exception:
            log.exception("a page could not be made")
            live.take({TROUBLE: "the service failed; see its log"})
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
    """Digest of all fragments except `TROUBLE`; valid only within this process, as it uses `hash`."""
    return format(hash(tuple((name, html[name]) for name in sorted(html) if name != TROUBLE)) & (2**64 - 1), "x")
