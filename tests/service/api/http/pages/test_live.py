"""Do open pages receive changes: each view rendered once for all pages, the newest state first, and none without a
page?
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from weighbridge.errors import Unavailable
from weighbridge_service.api.http.pages import live as live_module
from weighbridge_service.api.http.pages.live import TROUBLE, Fragments, LiveViews, digest
from weighbridge_service.catalog.changes import Changes
from weighbridge_storage.documents.names import ModelName

MODEL, OTHER = ModelName.parse("acme/smol"), ModelName.parse("acme/other")


class Source:
    """A view that shows a number."""

    def __init__(self) -> None:
        self.number = 0
        self.made = 0
        self.changes = Changes()
        self.stopped = False
        self.error: Exception | None = None
        self.views = LiveViews([self.changes], lambda: self.stopped)

    def make(self) -> Fragments:
        self.made += 1
        if self.error is not None:
            raise self.error
        return Fragments({"number": str(self.number), "name": "smol"}, busy=False)

    def set(self, number: int, model: ModelName | None = MODEL) -> None:
        self.number = number
        self.changes.notify(model)

    def follow(self, seen: str = "", key: str = "view", quota: str = "") -> AsyncIterator[str]:
        return self.views.follow(key, MODEL, self.make, seen, lambda: False, quota)


@pytest.fixture(autouse=True)
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off polling, so that a page receives only the changes that are pushed to it."""
    monkeypatch.setattr(live_module, "_PERIOD", 60.0)
    monkeypatch.setattr(live_module, "_BUSY_PERIOD", 0.02)
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 0.05)


def run(check: Callable[[Source], Any]) -> Source:
    """Run a check on an event loop of its own, for some seconds at most."""
    source = Source()
    asyncio.run(asyncio.wait_for(check(source), 20))
    return source


async def following(stream: AsyncIterator[str]) -> dict[str, str]:
    found: dict[str, str] = json.loads(await anext(stream))
    return found


def test_only_what_has_changed_is_told_and_made_once_for_all() -> None:
    async def check(source: Source) -> None:
        streams = [source.follow() for _ in range(50)]
        first = await asyncio.gather(*map(following, streams))
        assert first == [{"number": "0", "name": "smol", TROUBLE: ""}] * 50
        source.set(1)
        assert await asyncio.gather(*map(following, streams)) == [{"number": "1"}] * 50

    assert run(check).made == 2


def test_a_page_that_has_seen_it_all_is_told_what_comes_after() -> None:
    async def check(source: Source) -> None:
        stream = source.follow(digest(source.make().html))
        waiting = asyncio.create_task(following(stream))
        await following(source.follow())  # by then the first one has found that it is up to date
        source.set(5)
        assert await waiting == {"number": "5"}

    run(check)


def test_who_reads_late_gets_the_newest_state_alone() -> None:
    async def check(source: Source) -> None:
        stream, other = source.follow(), source.follow()
        await asyncio.gather(following(stream), following(other))
        for number in (1, 2, 3):
            source.set(number)
            assert await following(other) == {"number": str(number)}
        assert await following(stream) == {"number": "3"}

    run(check)


def test_changes_of_other_models_make_nothing() -> None:
    async def check(source: Source) -> None:
        stream = source.follow()
        await following(stream)
        source.set(1, OTHER)
        source.set(2, MODEL)
        assert await following(stream) == {"number": "2"}

    assert run(check).made == 2


def test_what_cannot_be_read_is_said_and_what_was_shown_stays() -> None:
    async def check(source: Source) -> None:
        stream = source.follow()
        await following(stream)
        source.error = Unavailable("the store does not answer")
        source.set(1)
        assert await following(stream) == {TROUBLE: "the store does not answer"}
        source.error = ValueError("a secret")
        source.set(1)
        assert await following(stream) == {TROUBLE: "the service failed; see its log"}
        source.error = None
        source.set(2)
        assert await following(stream) == {TROUBLE: "", "number": "2"}

    run(check)


def test_a_view_that_nobody_looks_at_is_made_no_more_and_views_are_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_MOST_VIEWS", 2)

    async def check(source: Source) -> None:
        streams: list[Any] = [source.follow(key=key, quota=key) for key in "ab"]
        await asyncio.gather(*map(following, streams))
        refused = [json.loads(each) async for each in source.follow(key="c", quota="c")]
        assert [list(each) for each in refused] == [[TROUBLE]]
        assert "too many" in refused[0][TROUBLE]
        for stream in streams:
            await stream.aclose()
        assert await following(source.follow(key="c", quota="c")) == {
            "number": "0",
            "name": "smol",
            TROUBLE: "",
        }

    run(check)


def test_who_opens_ever_more_views_leaves_some_to_others_and_slows_their_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_MOST_VIEWS", 40)
    monkeypatch.setattr(live_module, "_timed", lambda make: (make(), 0.05))
    monkeypatch.setattr(live_module, "_SHARE", 1.0)

    async def check(source: Source) -> None:
        greedy = [source.follow(key=f"g{n}", quota="greedy") for n in range(41)]
        told = await asyncio.gather(*map(following, greedy))
        assert sum("number" in each for each in told) == 30, "three fourths"
        streams = [source.follow(key=f"o{n}", quota="other") for n in range(2)]
        assert all("number" in each for each in await asyncio.gather(*map(following, streams)))
        begun = asyncio.get_running_loop().time()
        source.set(1)
        assert await asyncio.gather(*map(following, streams)) == [{"number": "1"}] * 2
        assert asyncio.get_running_loop().time() - begun < 1.0, "0.05 s for each of 32 views were 1.6 s"

    run(check)


def test_streams_end_with_the_service() -> None:
    async def check(source: Source) -> None:
        stream = source.follow()
        await following(stream)
        source.stopped = True
        source.changes.notify()
        assert [each async for each in stream] == []

    run(check)
