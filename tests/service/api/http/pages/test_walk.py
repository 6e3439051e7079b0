"""Does an open page show what happens, as it happens: models, pushes, who is missing, failures, tags?"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.service.api.http.pages.conftest import Place
from tests.support.browser import PHONE, Tab
from tests.support.raw_clients import RawClient, cut, rows_layout, stream_of
from weighbridge import TrainerClient

MODEL, RANKS = "acme/smol", 8
LATE = 5
"""The rank that comes last."""


def test_a_newcomers_walk_is_seen_on_the_page(place: Place, opened: Tab, shots: Path) -> None:
    page = opened.page
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
            rank: cut(stream_of(place.source.arrays, layouts[rank], assigned[rank]), 500)
            for rank in range(RANKS)
        }
        for rank in early:
            half = pieces[rank][: len(pieces[rank]) * (rank + 2) // (RANKS + 1)]
            raw.push(MODEL, number, half, rank=rank)
        opened.shows(".r-sending title", since=time.monotonic()) if False else None
        page.locator(".ranks .r-sending").first.wait_for(state="attached", timeout=15_000)
        for rank in (0, 1):
            raw.push(MODEL, number, pieces[rank], rank=rank)
            raw.seal(MODEL, number, rank=rank)
        page.locator(".ranks .r-sealed").nth(1).wait_for(state="attached", timeout=15_000)
        opened.shot("03-receiving")
        opened.shot("03-receiving-dark", dark=True)
        opened.shot("03-receiving-phone", size=PHONE)
        for rank in (*range(2, LATE), *range(LATE + 1, RANKS), LATE):
            raw.push(MODEL, number, pieces[rank], rank=rank)
            raw.seal(MODEL, number, rank=rank)
        opened.shows("tr:has-text('ppo-7') .state", "durable", since=time.monotonic())
        opened.shows(".note", f"rank {LATE} was")

        failing = raw.open(MODEL, ranks=RANKS, step=40, run="ppo-7")
        for rank in range(3):
            with_retry(raw, failing, rank, layouts)
        opened.shows(".push .bad", "ranks 3-7")
        opened.shows(".reason", "ranks", since=time.monotonic())
        opened.shot("04-failed")

    tag(opened, "prod", 3)
    opened.shows(".refline .ref", "prod")
    page.locator("#move-prod summary").click()
    page.locator("#version-prod").select_option("1")
    page.get_by_role("button", name="Move prod").click()
    opened.shows("li:has(.ref:text-is('prod')) .number", "1")
    assert place.running.service.catalog.refs(MODEL)["prod"] == 1
    opened.shot("05-model")
    opened.shot("05-model-dark", dark=True)
    opened.shot("05-model-phone", size=PHONE)

    opened.open("/")
    opened.shot("06-models")
    opened.shot("06-models-dark", dark=True)
    opened.shot("06-models-phone", size=PHONE)
    opened.open(f"/models/{MODEL}/versions/3")
    page.locator("img").first.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle") if False else None
    opened.shot("07-version")
    opened.shot("07-version-dark", dark=True)
    opened.shot("07-version-phone", size=PHONE)
    opened.open(f"/models/{MODEL}/versions/{failing}")
    opened.shot("08-failed-version")
    opened.open("/models/acme/smol/retention")
    opened.shot("09-retention")
    (shots / "seen.json").write_text(json.dumps(opened.seen, indent=1))
    assert opened.problems == []


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
