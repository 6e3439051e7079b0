"""Overview of a service and its screen: are rates and times those of the readings, and does all of it fit a
terminal?
"""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from weighbridge import Model, Version, VersionState
from weighbridge._cli.showing.overview import MemoryUse, Overview, ServiceState, overview, unfinished
from weighbridge._cli.showing.screen import draw, memory_text
from weighbridge._core.engines.facts import Engine
from weighbridge._core.reports.rank_progress import RankProgress

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


def reading(at_s: float, received: int, ranks: tuple[RankProgress, ...] = ()) -> ServiceState:
    push = version(
        18, VersionState.RECEIVING, received_bytes=received, sealed_ranks=1, waits_for=("rank 3 to declare",)
    )
    durable = version(17, VersionState.DURABLE, ready_time_ms=NOW_MS - 57_983, durable_time_ms=NOW_MS - 50_983)
    failed = version(16, VersionState.FAILED, error="rank 2 is gone")
    return ServiceState(
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
    before = reading(
        100.0, GB // 2, (RankProgress(0, 1, 0, 100, 500), RankProgress(1, 1, 2, 500, 500), RankProgress(2))
    )
    now = reading(102.0, GB, (RankProgress(0, 1, 0, 300, 500), RankProgress(1, 1, 2, 500, 500), RankProgress(2)))
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
    assert push.percent == 50
    assert [each.rate for each in push.ranks] == [100.0, 0.0, 0.0]


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


def test_ranks_are_asked_only_of_pushes_that_go_on() -> None:
    versions = [version(number, state) for number, state in enumerate(VersionState)]
    assert [each.state for each in unfinished(versions)] == [VersionState.OPEN, VersionState.RECEIVING]


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
        assert text.index("rank 2     not heard of") < text.index("rank 0      60%"), "the least far first"
    if width >= 110:
        assert "1 version behind" in text
        assert "rank 2 is gone" in text


def test_of_a_thousand_models_and_engines_as_many_are_drawn_as_there_is_room_for() -> None:
    one = reading(1.0, GB)
    many = replace(
        one,
        models=tuple(replace(one.models[0], name=f"acme/m{number}") for number in range(1000)),
        engines=tuple(replace(one.engines[0], engine_id=str(number)) for number in range(1000)),
    )
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with console.capture() as captured:
        console.print(draw(overview("s", None, many), 80, 10))
    lines = captured.get().splitlines()
    assert len(lines) < 50
    assert lines.count("and 990 more") == 2
    assert any("acme/m9 " in line for line in lines)


def test_a_service_that_is_away_is_said_to_be_beside_what_was_seen_last() -> None:
    found = overview("s", None, reading(1.0, 0), away_s=75.0, away_reason="connection refused")
    text = "\n".join(text_of(found, 100))
    assert "no answer for 75 s: connection refused" in text
    assert "acme/smol@17" in text


def test_what_others_have_written_does_not_move_the_cursor() -> None:
    bad = "x\x1b]0;title\x07\u202e"
    engine = Engine("e", bad, bad, bad, ref=bad, state=bad, standing=bad, error=bad)
    durable = version(17, VersionState.DURABLE, error=bad)
    model = replace(reading(1.0, 0).models[0], name=bad, refs={bad: 17}, model_type=bad, dtype=bad)
    durable = replace(durable, model=bad)
    pushed = replace(version(18, VersionState.RECEIVING, waits_for=(bad,)), model=bad)
    found = overview(
        bad, None, ServiceState(1.0, NOW_MS, models=(model,), versions=(durable, pushed), engines=(engine,))
    )
    text = "".join(text_of(found, 300))
    assert text.count("title") > 12
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_an_overview_is_json() -> None:
    said = seen().to_json()
    assert said["pushes"][0]["version"]["state"] == "receiving"
    assert said["pushes"][0]["rate"] == GB / 4
    assert said["memory"]["in_flight"] == {"in": 4_000_000, "out": 0}
    assert said["engines"][0]["behind"] == 1


def test_figures_are_for_people() -> None:
    assert memory_text(MemoryUse(GB, 2 * GB, 0, {"in": 0, "out": 5000}, 10_000)) == (
        "memory 1.0 GB of 2.0 GB; in flight 5.0 kB out, of 10.0 kB"
    )
    assert memory_text(MemoryUse(0, GB, GB, {"in": 0}, 1000)) == (
        "memory 0 B of 1.0 GB, spilled to disk 1.0 GB; in flight 0 B, of 1.0 kB"
    )
