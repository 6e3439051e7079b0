"""Overview of a service and its screen: are rates and times those of the readings, and does all of it fit a terminal?"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weighbridge import Model, Version, VersionState
from weighbridge._cli.showing.overview import MemoryUse, Overview, Reading, overview, unfinished
from weighbridge._cli.showing.screen import draw, memory_text, rate_text, seconds_text
from weighbridge._clients.calls.push_calls import RankState
from weighbridge._core.engines.facts import Engine

NOW_MS = 1_800_000_000_000
GB = 10**9


def version(number: int, state: VersionState, **more: object) -> Version:
    said = {
        "step": number * 10,
        "ranks": 4,
        "tensor_bytes": 2 * GB,
        "create_time_ms": NOW_MS - 60_000 + number,
    }
    return Version("acme/smol", number, state, **{**said, **more})  # type: ignore[arg-type]


def reading(at_s: float, received: int, ranks: tuple[RankState, ...] = ()) -> Reading:
    push = version(
        18, VersionState.RECEIVING, received_bytes=received, sealed_ranks=1, waits_for=("rank 3 to declare",)
    )
    durable = version(
        17, VersionState.DURABLE, ready_time_ms=NOW_MS - 57_983, durable_time_ms=NOW_MS - 50_983
    )
    failed = version(16, VersionState.FAILED, error="rank 2 is gone")
    return Reading(
        at_s,
        NOW_MS,
        models=(Model("acme/smol", "qwen3", "BF16", 10, 2 * GB, refs={"live": 17, "prod": 17, "old": 3}),),
        versions=(push, durable, failed),
        ranks={("acme/smol", 18): ranks} if ranks else {},
        engines=(
            Engine(
                "e1", "acme/smol", "vllm", "http://node7:8000", "live", 16, state="serving", standing="behind", behind=1, named=17
            ),
        ),
        memory=MemoryUse(3 * GB, 10 * GB, 0, {"in": 4_000_000, "out": 0}, 268_435_456),
    )  # fmt: skip


def seen() -> Overview:
    before = reading(100.0, GB // 2, (RankState(0, 100, 500, False), RankState(1, 500, 500, True)))
    now = reading(102.0, GB, (RankState(0, 300, 500, False), RankState(1, 500, 500, True)))
    return overview("127.0.0.1:50051", before, now)


def text_of(found: Overview, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as captured:
        console.print(draw(found, width))
    return captured.get().splitlines()


def test_rates_are_what_came_between_two_readings() -> None:
    (push,) = seen().pushes
    assert push.rate == GB / 4
    assert push.left_s == 4.0
    assert push.fraction == 0.5
    assert [each.rate for each in push.ranks] == [100.0, 0.0]


def test_without_a_reading_before_rates_are_unknown() -> None:
    (push,) = overview("s", None, reading(1.0, GB)).pushes
    assert (push.rate, push.left_s) == (None, None)


def test_a_push_that_began_anew_elsewhere_has_no_negative_rate() -> None:
    (push,) = overview("s", reading(1.0, GB), reading(2.0, 0)).pushes
    assert (push.rate, push.left_s) == (0.0, None)


def test_versions_say_how_long_they_took_and_which_refs_name_them() -> None:
    durable, failed = seen().versions
    assert (durable.version.number, durable.refs) == (17, ("live", "prod"))
    assert (durable.ready_s, durable.durable_s) == (2.0, 9.0)
    assert (failed.ready_s, failed.durable_s, failed.refs) == (None, None, ())


def test_ranks_are_asked_only_of_pushes_that_have_begun_and_have_not_too_many() -> None:
    versions = [
        version(1, VersionState.OPEN),
        version(2, VersionState.RECEIVING),
        version(3, VersionState.RECEIVING, ranks=65),
        version(4, VersionState.READY),
    ]
    assert [each.number for each in unfinished(versions, 64)] == [2]


@pytest.mark.parametrize("width", [20, 40, 72, 80, 110, 140, 200])
def test_no_line_is_wider_than_the_terminal_and_what_matters_is_there(width: int) -> None:
    lines = text_of(seen(), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("RECEIVING", "ENGINES", "VERSIONS", "MODELS", "@18", "50%"):
        assert part in text, part
    if width >= 40:
        assert "rank 3 to declare" in text
        assert "250.0 MB/s" in text
        assert "rank 0" in text
        assert "rank 1 " not in text, "what is sealed is not waited for"
    if width >= 110:
        assert "1 version behind" in text
        assert "rank 2 is gone" in text


def test_a_service_that_is_away_is_said_to_be_beside_what_was_seen_last() -> None:
    found = overview("s", None, reading(1.0, 0), away_s=75.0, away_reason="connection refused")
    text = "\n".join(text_of(found, 100))
    assert "no answer for 75 s: connection refused" in text
    assert "acme/smol@17" in text


def test_what_others_have_written_does_not_move_the_cursor() -> None:
    engine = Engine("e", "acme/smol", "vllm\x1b[2J", "http://\x07x", error="bad\x1b]0;title\x07")
    found = overview("s", None, Reading(1.0, NOW_MS, models=reading(1.0, 0).models, engines=(engine,)))
    assert "\x1b" not in "".join(text_of(found, 200))
    assert "\x07" not in "".join(text_of(found, 200))


def test_an_overview_is_json() -> None:
    said = seen().to_json()
    assert said["pushes"][0]["version"]["state"] == "receiving"
    assert said["pushes"][0]["rate"] == GB / 4
    assert said["memory"]["in_flight"] == {"in": 4_000_000, "out": 0}
    assert said["engines"][0]["behind"] == 1


def test_figures_are_for_people() -> None:
    times = [seconds_text(each) for each in (0.04, 9.9, 10, 119, 120, 7199, 7200, 172_800)]
    assert times == ["0.0 s", "9.9 s", "10 s", "119 s", "2 min", "120 min", "2 h", "2 d"]
    assert rate_text(None) == "-"
    assert rate_text(1_500_000.4) == "1.5 MB/s"
    assert memory_text(MemoryUse(GB, 2 * GB, 0)) == "memory 1.0 GB of 2.0 GB"
    assert memory_text(MemoryUse(0, GB, GB, {"in": 0}, 1000)) == (
        "memory 0 B of 1.0 GB, spilled to disk 1.0 GB; in flight 0 B, of 1.0 kB"
    )
