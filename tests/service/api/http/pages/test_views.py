"""Do views say what was read: figures in words, engines in the order of their trouble, times as parts of a bar, tensors
in order?
"""

from __future__ import annotations

import numpy as np
import pytest

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.engines.facts import Engine
from weighbridge._core.layouts import Placement, Shard
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import Version, VersionState
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.distributions import distribution, sample, svg
from weighbridge_service.api.http.pages.engine_view import engines_view, serving, steps_to
from weighbridge_service.api.http.pages.push_view import live_push
from weighbridge_service.api.http.pages.side_by_side.contents import in_order
from weighbridge_service.api.http.pages.timeline_view import scale_ms
from weighbridge_service.api.http.pages.version_summary import UNITS, spans_of, version_summary
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.push.machine.rank_progress import PushProgress
from weighbridge_storage.memory.file_bytes import MappedBytes

UNKNOWN = PushProgress()
NOBODY = Viewer("", (), proven=False)


def test_figures_that_are_not_known_are_no_figures() -> None:
    assert words.rate(0, 10) == words.rate(10, 0) == words.span(0, 10) == words.span(10, 0) == words.NONE
    assert words.rate(5_000_000, 2.0) == "2.5 MB/s"


def test_parts_of_a_bar_stand_for_times_on_one_scale() -> None:
    version = Version(
        "a/b", 1, VersionState.DURABLE,
        create_time_ms=1000, ready_time_ms=1500, verified_time_ms=1600, durable_time_ms=2000,
    )  # fmt: skip
    parts = spans_of(version, UNKNOWN, 2000)
    assert [(each.kind, each.start, each.length) for each in parts] == [
        ("received", 0, 250),
        ("verified", 250, 50),
        ("stored", 300, 200),
    ]
    assert spans_of(Version("a/b", 1, VersionState.OPEN, create_time_ms=1000), UNKNOWN, 2000) == ()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], 0),
        ([500], 500),
        ([500, 90_000], 90_000),
        ([0, 500, 600, 90_000], 600),
        ([*range(100, 119), 90_000, 95_000], 118),
        ([*range(100, 110), 90_000, 91_000, 92_000], 92_000),
        ([400, 500, 900], 900),
    ],
    ids=["none", "one", "two", "one far longer", "a tenth far longer", "more than a tenth", "alike"],
)
def test_one_slow_push_does_not_set_the_scale_of_all_bars(lengths: list[int], expected: int) -> None:
    assert scale_ms(lengths) == expected


@pytest.mark.parametrize(
    ("created", "times"),
    [
        (5000, (1000, 900, 800)),
        (2**53, (1, 2, 3)),
        (1, (2**53, 1, 2**53)),
        (3_800_000_000_000, (1_700_000_000_000, 3_800_000_000_001, 2**53)),
    ],
    ids=["backwards", "a far opening", "leaps", "a clock in 2090"],
)
def test_no_clock_makes_a_bar_that_cannot_be_drawn(created: int, times: tuple[int, int, int]) -> None:
    ready, verified, durable = times
    version = Version(
        "a/b", 1, VersionState.DURABLE, tensor_bytes=5,
        create_time_ms=created, ready_time_ms=ready, verified_time_ms=verified, durable_time_ms=durable,
    )  # fmt: skip
    for scale in (1, 1000, 2**53):
        for each in spans_of(version, UNKNOWN, scale):
            assert 0 <= each.start < each.start + each.length <= UNITS
            assert "-" not in each.text
    assert words.iso(max(created, *times)) <= "9999-12-31T23:59:59.000+00:00"
    assert words.moment(created).endswith(" UTC")


def test_a_push_that_was_given_up_keeps_what_it_cost() -> None:
    version = Version(
        "a/b",
        4,
        VersionState.FAILED,
        ranks=5,
        tensor_bytes=9_000_000,
        received_bytes=100,
        create_time_ms=1000,
    )
    ranks = (
        RankProgress(0, 1100, 4000, 2_000_000, 2_000_000),
        RankProgress(1, 1100, 6000, 2_000_000, 2_000_000),
        RankProgress(2, 1200, 0, 500_000, 2_000_000),
        RankProgress(3),
        RankProgress(4),
    )
    said = version_summary(version, (), PushProgress(ranks, ended_ms=309_000), NOBODY, 308_000)
    assert said.cost == ("4.5 MB of 9.0 MB had arrived; 2 of 5 ranks had sealed, rank 1 last")
    assert (said.times, said.spans[0].length) == ("given up after 5 min 08 s", UNITS)
    declared = tuple(RankProgress(rank, 1100 + rank) for rank in range(3))
    said = version_summary(version, (), PushProgress(declared, ended_ms=2000), NOBODY, 1000)
    assert said.cost == "100 B of 9.0 MB had arrived; 3 of 3 ranks had declared, rank 2 last"
    elsewhere = version_summary(
        Version("a/b", 4, VersionState.FAILED, create_time_ms=1000),
        (),
        PushProgress(ended_ms=2000),
        NOBODY,
        1000,
    )
    assert (elsewhere.cost, elsewhere.times) == ("", "given up after 1.00 s")


def test_a_push_that_is_silent_says_when_it_is_given_up_and_one_that_copies_no_figure() -> None:
    version = Version("a/b", 3, VersionState.RECEIVING, ranks=2, tensor_bytes=1000, create_time_ms=1000)
    heard = PushProgress((RankProgress(0, 1100), RankProgress(1)), 60_000, 360_000)
    assert (live_push(version, heard, 62_000).heard_ms, live_push(version, heard, 62_000).given_up_ms) == (
        0,
        0,
    )
    silent = live_push(version, heard, 64_000)
    assert (silent.heard_ms, silent.given_up_ms, silent.percent_text) == (60_000, 360_000, "0 %")
    copying = tuple(RankProgress(rank, 1100, 0, 0, 500, copying=True) for rank in range(2))
    view = live_push(version, PushProgress(copying, 60_000, 360_000), 90_000)
    assert (view.percent_text, view.given_up_ms) == ("copying", 0)
    assert [(each.stage, each.percent) for each in view.ranks] == [("copying", 0)] * 2
    assert view.ranks_text == "0 of 2 sealed, 2 copying to shared memory"


def test_a_push_names_who_is_missing_and_pushes_elsewhere() -> None:
    version = Version("a/b", 3, VersionState.RECEIVING, ranks=5, tensor_bytes=1000, create_time_ms=1000)
    ranks = [
        RankProgress(0, 1100, 1900, 100, 100),
        RankProgress(1, 1100, 0, 50, 200),
        RankProgress(2, 1100, 0, 0, 300),
        RankProgress(3),
        RankProgress(4, elsewhere=True),
    ]
    view = live_push(version, PushProgress(tuple(ranks)), now_ms=2000)
    assert [(each.stage, each.percent) for each in view.ranks] == [
        ("sealed", 100),
        ("sending", 25),
        ("declared", 0),
        ("missing", 0),
        ("elsewhere", 0),
    ]
    assert (view.percent, view.missing, view.rate, view.ranks_text) == (
        15,
        "rank 3",
        "150 B/s",
        "1 of 5 sealed",
    )


def test_engines_that_need_a_look_come_first_and_those_that_ended_not_at_all() -> None:
    def engine(name: str, standing: str, version: int, **more: object) -> Engine:
        facts = {
            "model": "a/b",
            "address": f"http://{name}",
            "kind": "vllm",
            "ref": "live",
            "state": "serving",
            "named": 9,
        }
        return Engine(name, **{**facts, "version": version, "standing": standing, **more})  # type: ignore[arg-type]

    engines = [
        engine("fine", "current", 9, heard_time_ms=7),
        engine("unlike", "current", 9, proof="failed"),
        engine("far", "behind", 2, behind=7),
        engine("silent", "stale", 9, heard_time_ms=5),
        engine("broken", "behind", 8, behind=1, error="no room"),
        engine("moved back", "behind", 11),
        engine("new", "behind", 0, behind=0),
        engine("over", "gone", 9, state="ended"),
        engine("lost", "gone", 9, heard_time_ms=4),
    ]
    view = engines_view("a/b", engines)
    assert [
        (each.label.removeprefix("vllm at http://"), each.standing_text, each.heard_time_ms)
        for each in (row.engine for row in view.rows)
    ] == [
        ("broken", "1 version behind", 0),
        ("unlike", "current", 0),
        ("silent", "stale", 5),
        ("far", "7 versions behind", 0),
        ("moved back", "serves a newer one", 0),
        ("new", "serves no version", 0),
        ("fine", "current", 0),
        ("lost", "gone", 4),
    ]
    assert view.summary == ("1 stale", "4 behind", "2 current", "1 gone")
    assert serving(engines) == {9: 3, 2: 1, 8: 1, 11: 1}


STEP = {
    "receive": 0.25,
    "hear": 0.05,
    "wait": 0.0,
    "stage": 0.2,
    "agree": 0.1,
    "pause": 0.1,
    "apply": 0.2,
    "resume": 0.1,
    "confirm": 0.0,
}


def stepped(parts: dict[str, float], version: int = 9) -> Engine:
    return Engine("e1", "a/b", "vllm", "http://e1", version=version, update_version=9, update_parts=parts)


def test_the_step_that_took_an_engine_to_a_version_is_a_bar_and_words() -> None:
    (step,) = steps_to([stepped({}), stepped(STEP)], 9)
    assert step.engine == "vllm at http://e1"
    assert [(each.kind, each.start, each.length) for each in step.spans] == [
        ("received", 0, 250), ("verified", 250, 50), ("verified", 300, 200), ("verified", 500, 100), ("stored", 600, 100), ("stored", 700, 200),
        ("stored", 900, 100),
    ]  # fmt: skip
    assert step.total == "1.00 s"
    assert step.times.startswith("receive 250 ms, hear 50 ms, wait 0 ms, stage 200 ms")
    assert step.moments.startswith("opened -250 ms, heard +50 ms, begun +50 ms, staged +250 ms, agreed +350 ms")
    assert steps_to([stepped(STEP)], 8) == ()


def test_the_way_to_the_service_is_part_of_the_bar_where_it_is_known() -> None:
    (step,) = steps_to([stepped({**STEP, "offer": 0.5, "open": 0.25, "receive": 0.25})], 9)
    assert [(each.kind, each.start, each.length) for each in step.spans][:4] == [
        ("received", 0, 286), ("received", 286, 143), ("received", 429, 142), ("verified", 571, 29),
    ]  # fmt: skip
    assert [each.text for each in step.spans][:3] == ["offer 500 ms", "open 250 ms", "receive 250 ms"]
    assert step.total == "1.75 s"
    assert step.moments.startswith("offered -1.00 s, opened -500 ms, arriving -250 ms, heard +50 ms")


def test_an_engine_that_began_before_its_version_was_ready_lies_over_its_arrival() -> None:
    (step,) = steps_to([stepped({**STEP, "wait": -0.2, "stage": 0.1, "agree": 0.2})], 9)
    placed = {each.text.split()[0]: (each.start, each.start + each.length) for each in step.spans}
    assert placed["receive"][1] > placed["stage"][1] > placed["stage"][0] > 0
    assert "wait" not in placed
    assert "staged -50 ms" in step.moments
    assert "wait -200 ms" in step.times


def test_a_step_of_which_little_is_known_has_no_bar() -> None:
    (step,) = steps_to([stepped({"agree": 0.1, "apply": 0.2})], 9)
    assert (step.spans, step.total, step.moments) == ((), "", "")
    assert step.times == "agree 100 ms, apply 200 ms"


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = ["layers.10.w", "layers.2.w", "embed", "layers.2.b"]
    assert sorted(names, key=in_order) == ["embed", "layers.2.b", "layers.2.w", "layers.10.w"]


@pytest.mark.parametrize("name", ["F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I8", "U16", "BOOL", "C64"])
def test_a_sample_is_of_the_values_that_are_stored(name: str) -> None:
    import torch

    dtype = dtypes.parse(name)
    stored = (torch.arange(30_000) % 7 - 3).to(torch.float64)
    values = (stored.abs() if name in ("U16", "BOOL") else stored).to(dtype.torch)
    raw = np.frombuffer(values.view(torch.uint8).numpy().tobytes(), np.uint8)
    place = Placement(Shard("t", Box.whole((30_000,))), "f", 5, raw.size)
    padded = np.concatenate([np.zeros(5, np.uint8), raw])
    found = sample(MappedBytes(padded, None), place, dtype)  # type: ignore[arg-type]
    assert {*found} == {*(values.abs() if name == "C64" else values).to(torch.float64).numpy()}
    assert found.size * dtype.itemsize <= 16 * 4096


def test_a_distribution_is_that_of_numpy_and_tells_what_is_not_finite() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.5, 10_000)
    found = distribution(np.concatenate([values, [np.nan, np.inf]]))
    assert (found.mean, found.sigma) == pytest.approx((values.mean(), values.std()))
    assert (found.least, found.greatest) == (values.min(), values.max())
    assert (sum(found.counts), found.sampled, found.nonfinite) == (10_000, 10_002, 2)
    assert np.argmax(found.counts) == pytest.approx(16, abs=3), "the most lie in the middle"
    for odd in (np.array([]), np.full(3, np.nan), np.zeros(5), np.full(4, 1e308), np.array([-1e308, 1e308])):
        assert svg(distribution(odd)).startswith("<svg")
