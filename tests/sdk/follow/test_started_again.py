"""Does an agent notice that its engine was restarted, or moved to another version, while the ref did not move?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL, Recording
from weighbridge._cli import commands
from weighbridge.errors import Unavailable
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import Serving
from weighbridge.follow.news import with_looks


class Still:
    """A service whose ref names version 2, and does not move."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def watch_refs(self, refs: list[tuple[str, str]]) -> Iterator[tuple[str, SimpleNamespace]]:
        yield refs[0][1], SimpleNamespace(number=2, traceparent="", metadata={})
        assert self.ended.wait(60)

    def version(self, model: str, ref: str) -> SimpleNamespace:
        return SimpleNamespace(number=2)


class Restarted(Recording):
    """An engine that serves the version it applied last; after a restart it serves version 1.

    Attributes:
        looks: the event at each of the next polls of the engine; none after these.
    """

    def __init__(self, *looks: Serving | None) -> None:
        super().__init__(Serving(1, model=MODEL, instances=("a",)))
        self.looks: list[Serving | None] = []
        self._next = list(looks)
        self._away = False

    def serving(self) -> Serving:
        if self.looks:
            found = self.looks.pop(0)
            self._away = found is None
            self._serving = found or self._serving
        if self._away:
            raise Unavailable("made up")
        return self._serving

    def apply(self, version: int, label: str) -> None:
        super().apply(version, label)
        self._serving = Serving(version, model=MODEL, instances=self._serving.instances)
        self.looks, self._next = [self._serving, *self._next], []


class Said:
    """A reporter that records the changes it is given."""

    status = SimpleNamespace(behind=0)

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []

    def say(self, **changes: Any) -> None:
        self.changes.append(changes)


def followed(engine: Restarted, said: Said | None = None, count: int = 2) -> list[Followed]:
    """The first lines of an agent that polls its engine without a pause."""
    service = Still()
    follower = Follower(cast("Any", service), MODEL, engine, look_seconds=0.01, reporter=cast("Any", said))
    try:
        steps = follower.run()
        return [next(steps) for _ in range(count)]
    finally:
        service.ended.set()


def test_an_engine_that_was_started_again_with_an_older_version_is_taken_to_the_refs_again() -> None:
    engine, said = Restarted(None, None, Serving(1, model=MODEL, instances=("b",))), Said()
    first, again = followed(engine, said)
    assert [(each.version, each.serves, each.error) for each in (first, again)] == [(2, 2, "")] * 2
    assert [each for each in engine.asked if "prepare" in each] == ["prepare 2"] * 2
    assert engine.asked.index("connect", engine.asked.index("prepare 2") + 1), "it was connected again"
    failing = [each for each in said.changes if each.get("state") == "failing"]
    assert [each["version"] for each in failing] == [1], "what it served meanwhile was said"


def test_an_engine_that_comes_later_is_brought_to_the_version_of_the_others() -> None:
    apart = Serving(None, "different versions are served", MODEL, ("a", "b"))
    first, again = followed(Restarted(apart))
    assert (first.error, again.error, again.serves) == ("", "", 2)


def test_an_engine_that_was_started_again_with_the_refs_version_is_told_where_versions_come_from() -> None:
    engine = Restarted(Serving(2, model=MODEL, instances=("b",)))
    _, again = followed(engine)
    assert (again.version, again.nbytes, again.error) == (2, 0, "")
    assert [each for each in engine.asked if "prepare" in each] == ["prepare 2"]
    assert engine.asked[-1] == "connect"


def test_an_engine_that_others_have_updated_is_not_fought_for_but_said_to_be_elsewhere() -> None:
    elsewhere = Serving(7, model=MODEL, instances=("a",))
    restarted = Serving(1, model=MODEL, instances=("b",))
    engine, said = Restarted(elsewhere, elsewhere, elsewhere, restarted), Said()
    followed(engine, said)
    failing = [each for each in said.changes if each.get("state") == "failing"]
    assert [each["version"] for each in failing] == [7, 1]
    assert "served version 2 before, and this agent has not updated it since" in failing[0]["error"]
    assert len([each for each in engine.asked if "prepare" in each]) == 2, "only for the start"


def test_what_an_engine_serves_after_an_update_is_what_counts() -> None:
    class Elsewhere(Recording):
        def apply(self, version: int, label: str) -> None:
            self._serving = Serving(9, model=MODEL)

    done = Follower(cast("Any", None), MODEL, Elsewhere(Serving(1, model=MODEL))).take_to(2)
    assert done.serves == 9
    assert "serves version 9 and not 2" in done.error


def test_nothing_is_given_while_nothing_comes_and_the_next_value_is_asked_for_when_it_is_wanted() -> None:
    asked: list[int] = []
    go_on = threading.Event()

    def source() -> Iterator[int]:
        for number in range(3):
            asked.append(number)
            yield number
            assert go_on.wait(60)
        raise Unavailable("made up")

    values = with_looks(source(), 0.01)
    assert next(value for value in values if value is not None) == 0
    assert asked == [0]
    assert next(values) is None
    go_on.set()
    assert next(value for value in values if value is not None) == 1
    with pytest.raises(Unavailable, match="made up"):
        for _ in values:
            pass
    assert list(with_looks(iter([]), 1.0)) == []


def test_a_command_that_names_several_servers_is_refused() -> None:
    line = [
        "follow",
        MODEL,
        "--url",
        "http://127.0.0.1:1",
        "--url",
        "http://127.0.0.1:2",
        "--server",
        "127.0.0.1:1",
    ]
    done = CliRunner().invoke(commands, line)
    assert done.exit_code == 2
    assert "names 2 servers: run one agent beside each" in done.output
