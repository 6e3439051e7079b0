"""Does an open page show events as they happen: models, pushes, missing ranks, failures, tags?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.service.api.http.pages.conftest import Place
from tests.support.browser import PHONE, Tab
from tests.support.raw_clients import RawClient, cut, rows_layout, stream_of
from tests.support.sglang_fakes import fake_sglang
from weighbridge import TrainerClient
from weighbridge._cli import commands
from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.engines.entries import Owner

MODEL, RANKS = "acme/smol", 8
LATE = 5
"""The rank that comes last."""


@pytest.fixture
def engine() -> Iterator[Any]:
    """The engine that the agent updates."""
    with fake_sglang() as found:
        yield found


def test_a_newcomers_walk_is_seen_on_the_page(
    place: Place, opened: Tab, shots: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighbridge._cli.following.end_tidily", lambda: None)  # a thread may set no handlers
    page = opened.page
    monkeypatch.setattr("socket.gethostname", lambda: "node-2")  # the host of the agent in screenshots
    opened.open("/")
    opened.shows("text=There is no model yet")
    opened.shot("01-empty")

    with TrainerClient(place.running.address) as trainer, RawClient(place.running.address) as raw:
        trainer.register_model(MODEL, place.source.folder)
        opened.shows("th >> text=acme/smol", since=time.monotonic())
        opened.open(f"/models/{MODEL}")
        opened.shows("text=No version yet")

        pushed = trainer.push_folder(MODEL, place.source.folder, step=10, metadata={"reward": 0.61})
        pushed.wait(timeout=60)
        opened.shows(".state", "durable", since=time.monotonic())
        trainer.push_folder(MODEL, place.source.folder, step=20, metadata={"reward": 0.68}).wait(timeout=60)
        opened.shows("tbody .num a", "2", since=time.monotonic())

        following(place, engine.url)
        opened.shows(".engines .e-current", "current", since=time.monotonic())

        number = raw.open(MODEL, ranks=RANKS, step=30, run="ppo-7")
        layouts = [rows_layout(place.source.arrays, rank, RANKS) for rank in range(RANKS)]
        early = [rank for rank in range(RANKS) if rank != LATE]
        for rank in early:
            with_retry(raw, number, rank, layouts)
        opened.shows(".push .bad", f"rank {LATE}", since=time.monotonic())
        opened.shot("02-missing-rank")
        assigned = {LATE: raw.declare(MODEL, number, layouts[LATE], rank=LATE)}
        for rank in early:
            assigned[rank] = raw.declare(MODEL, number, layouts[rank], rank=rank)
        pieces = {
            rank: cut(stream_of(place.source.arrays, layouts[rank], assigned[rank]), 500) for rank in range(RANKS)
        }
        for rank in early:
            half = pieces[rank][: len(pieces[rank]) * (rank + 2) // (RANKS + 1)]
            raw.push(MODEL, number, half, rank=rank)
        page.locator(".ranks .r-sending").first.wait_for(state="attached", timeout=15_000)
        for rank in (0, 1):
            raw.push(MODEL, number, pieces[rank], rank=rank)
            raw.seal(MODEL, number, rank=rank)
        page.locator(".ranks .r-sealed").nth(1).wait_for(state="attached", timeout=15_000)
        opened.shot("03-receiving")
        page.screenshot(path=shots / "page-push.png", clip={"x": 0, "y": 0, "width": 1280, "height": 370})
        opened.shot("03-receiving-dark", dark=True)
        opened.shot("03-receiving-phone", size=PHONE)
        for rank in (*range(2, LATE), *range(LATE + 1, RANKS), LATE):
            raw.push(MODEL, number, pieces[rank], rank=rank)
            raw.seal(MODEL, number, rank=rank)
        opened.shows("tr:has-text('ppo-7') .state", "durable", since=time.monotonic())
        opened.shows(".note", f"rank {LATE} was")
        opened.shows(".engines tbody .num", "3", since=time.monotonic())
        opened.shows(".engines [data-label='Follows']", "latest \u2192 3")

        failing = raw.open(MODEL, ranks=RANKS, step=40, run="ppo-7")
        for rank in range(3):
            with_retry(raw, failing, rank, layouts)
        opened.shows(".push .bad", "ranks 3-7")
        opened.shows(".reason", "ranks 3-7 have not declared", since=time.monotonic())
        opened.shows(".figures div:has-text('version 3')", f"{failing} failed")
        opened.shot("04-failed")

    tag(opened, "prod", 3)
    opened.shows(".refline .ref", "prod")
    page.locator("#move-prod summary").click()
    page.locator("#version-prod").select_option("1")
    page.get_by_role("button", name="Move prod").click()
    opened.shows("li:has(.ref:text-is('prod')) .number", "1")
    assert place.running.service.catalog.refs(MODEL)["prod"] == 1
    report(place, "vllm", "http://node-3:8000", 1)
    report(place, "sglang", "http://node-4:30000", 2, error="node-4 has no room for version 3", state="failing")
    opened.shows(".engines .e-behind", "2 versions behind")
    opened.shows(".engines .reason", "no room")
    opened.shot("page-model")
    opened.shot("05-model-dark", dark=True)
    opened.shot("05-model-phone", size=PHONE)

    opened.open("/")
    opened.shot("06-models")
    opened.shot("06-models-dark", dark=True)
    opened.shot("06-models-phone", size=PHONE)
    opened.open(f"/models/{MODEL}/versions/3")
    opened.shows(".served", "sglang at")
    page.locator("img").first.scroll_into_view_if_needed()
    opened.shot("07-version")
    opened.shot("07-version-dark", dark=True)
    opened.shot("07-version-phone", size=PHONE)
    opened.open(f"/models/{MODEL}/versions/{failing}")
    opened.shot("08-failed-version")
    opened.open("/models/acme/smol/retention")
    opened.shot("09-retention")
    (shots / "seen.json").write_text(json.dumps(opened.seen, indent=1))
    assert opened.problems == []


def following(place: Place, url: str) -> threading.Thread:
    """The agent's command, which follows `latest`."""
    line = ["follow", MODEL, "--engine", "sglang", "--url", url, "--server", place.running.address, "--json"]
    thread = threading.Thread(target=CliRunner().invoke, args=(commands, [*line, "--count", "9"]), daemon=True)
    thread.start()
    return thread


def report(place: Place, kind: str, address: str, version: int, *, error: str = "", state: str = "serving") -> None:
    """Report an engine as another agent does."""
    said = EngineReport(
        kind, MODEL, kind, address, "latest", version, state=state, error=error, host=address[7:13], pid=412,
        update_version=version, update_bytes=78_600, update_prepare_seconds=0.21, update_pause_seconds=0.04, update_lane="grpc",
        update_parts={"wait": 0.001, "stage": 0.21, "agree": 0.03, "pause": 0.004, "apply": 0.033, "resume": 0.003, "confirm": 0.01},
    )  # fmt: skip
    place.running.service.engines.report(Owner(), said)


def tag(opened: Tab, ref: str, version: int) -> None:
    """Give a version a tag, by the page's form."""
    page = opened.page
    page.locator("#new-tag summary").click()
    page.locator("#new-ref").fill(ref)
    page.locator("#new-version").select_option(str(version))
    page.get_by_role("button", name="Tag", exact=True).click()


def with_retry(raw: RawClient, number: int, rank: int, layouts: list) -> None:  # type: ignore[type-arg]
    """Declare a rank's layout, and do not wait for the others."""
    try:
        raw.declare(MODEL, number, layouts[rank], rank=rank, seconds=0.3)
    except Exception:
        return
