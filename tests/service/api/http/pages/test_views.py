"""Do views say what was read: figures in words, engines in the order of their trouble, times as parts of a bar, tensors in order?"""

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
from weighbridge_service.api.http.pages.engine_view import engines_view, serving
from weighbridge_service.api.http.pages.model_view import spans_of
from weighbridge_service.api.http.pages.push_view import live_push
from weighbridge_service.api.http.pages.version_view import in_order
from weighbridge_storage.memory.file_bytes import MappedBytes


def test_figures_that_are_not_known_are_no_figures() -> None:
    assert words.rate(0, 10) == words.rate(10, 0) == words.span(0, 10) == words.span(10, 0) == words.NONE
    assert words.rate(5_000_000, 2000) == "2.5 MB/s"


def test_parts_of_a_bar_stand_for_times_on_one_scale() -> None:
    version = Version(
        "a/b", 1, VersionState.DURABLE,
        create_time_ms=1000, ready_time_ms=1500, verified_time_ms=1600, durable_time_ms=2000,
    )  # fmt: skip
    parts = spans_of(version, 2000)
    assert [(each.kind, each.start, each.length) for each in parts] == [
        ("received", 0, 250),
        ("verified", 250, 50),
        ("stored", 300, 200),
    ]
    assert spans_of(Version("a/b", 1, VersionState.OPEN, create_time_ms=1000), 2000) == ()


def test_a_push_names_who_is_missing_and_pushes_elsewhere() -> None:
    version = Version("a/b", 3, VersionState.RECEIVING, ranks=5, tensor_bytes=1000, create_time_ms=1000)
    ranks = [
        RankProgress(0, 1100, 1900, 100, 100),
        RankProgress(1, 1100, 0, 50, 200),
        RankProgress(2, 1100, 0, 0, 300),
        RankProgress(3),
        RankProgress(4, elsewhere=True),
    ]
    view = live_push(version, ranks, now_ms=2000)
    assert [(each.state, each.percent) for each in view.ranks] == [
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
        engine("fine", "current", 9),
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
        (each.label.removeprefix("vllm at http://"), each.standing_text, each.silent_ms) for each in view.rows
    ] == [
        ("broken", "behind by 1 version", 0),
        ("silent", "stale", 5),
        ("far", "behind by 7 versions", 0),
        ("moved back", "live names 9", 0),
        ("new", "serves none yet", 0),
        ("fine", "current", 0),
        ("lost", "gone", 4),
    ]
    assert view.summary == ("1 stale", "4 behind", "1 current", "1 gone")
    assert serving(engines) == {9: 2, 2: 1, 8: 1, 11: 1}


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
