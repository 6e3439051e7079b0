"""Do pages answer in bounded time and with what can be shown, whatever stores, clocks, figures, names and readers
do?
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.service.api.http.pages.conftest import Place, place_of
from tests.support.browser import PHONE, tab
from tests.support.heads import entry, opened
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.api.http.pages import live, routes
from weighbridge_service.engines.entries import Owner
from weighbridge_storage.documents.entries import FailedEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import claim_version
from weighbridge_storage.stores.local import LocalStore

MODEL = "acme/smol"
LONG = f"{'n' * 96}/{'m' * 96}"
FAR, IN_2090 = 2**53 - 1, 3_800_000_000_000
TIMES = (
    (FAR, FAR, FAR, FAR),
    (1, FAR, 1, FAR),
    (IN_2090, IN_2090 + 5, 7, IN_2090 + 10),
    (IN_2090, 5, 5, 5),
)
"""When versions were opened, ready, verified and durable, by clocks that are wrong."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service with a model, whose head another program has filled with nonsense, and one whose names are as long as
    they may be.
    """
    with place_of(tmp_path_factory.mktemp("bounds")) as found:
        _fill(found)
        yield found


def _fill(place: Place) -> None:
    service = place.running.service
    with TrainerClient(place.running.address) as trainer:
        for name in (MODEL, LONG):
            trainer.register_files(name, place.source.files)
            trainer.push_folder(name, place.source.folder, step=1, run="r" * 256, metadata={"k" * 64: "v" * 2000}).wait(
                timeout=60
            )
        trainer.set_ref(LONG, "t" * 64, 1)
    for n, model in enumerate((MODEL, LONG)):
        report = EngineReport(
            f"{'e' * 60}{n}", model, "k" * 32, "a" * 255, "live", 2**53, 2**53, "failing", "x" * 900, "h" * 255,
            2**53, 2**53, 2**53, 3e8, 3e8,
        )  # fmt: skip
        service.engines.report(Owner(), report)
    heads = HeadStore(service.catalog.store)
    for times in TIMES:
        heads.edit(ModelName.parse(MODEL), lambda history, times=times: (_published(history, times), None))  # type: ignore[misc]
    failed = FailedEntry(90, "f" * 256, FAR, step=FAR, ranks=FAR, created_ms=1)
    heads.update(
        ModelName.parse(MODEL),
        lambda head: (
            replace(
                head,
                next_version=92,
                failed={90: failed, 91: replace(failed, number=91, failed_ms=1, created_ms=FAR)},
            ),
            None,
        ),
    )


def _published(history: History, times: tuple[int, int, int, int]) -> Head:
    """The head with one more version, whose figures are as large as they may be."""
    created, ready, verified, durable = times
    head, there = opened(history.head, now_ms=int(time.time() * 1000))
    done = replace(
        entry(there.number), step=FAR, created_ms=created, ready_ms=ready, verified_ms=verified, durable_ms=durable,
        nbytes=FAR, tensor_count=FAR, ranks=FAR, nonfinite_elements=FAR, run="\u05d0\u05d1 12 \u0627\u0644",
    )  # fmt: skip
    return publish(history.under(claim_version(head, there.number, done.write_id)), done)


@contextmanager
def store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The store answers no reads until the event is set."""
    go_on, get = threading.Event(), LocalStore.get

    def hanging(store: LocalStore, key: str) -> Any:
        go_on.wait(60)
        return get(store, key)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "get", hanging)
        try:
            yield go_on
        finally:
            go_on.set()


def test_every_page_answers_in_bounded_time_while_the_store_hangs_and_open_ones_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(live, "_LATE_SECONDS", 1.0)
    path = f"/models/{MODEL}"
    with place_of(tmp_path) as place, ThreadPoolExecutor(40) as pool:
        with TrainerClient(place.running.address) as trainer:
            trainer.register_files(MODEL, place.source.files)
        with httpx.Client(base_url=place.url, timeout=60) as http:
            with http.stream("GET", f"{path}/events") as followed:
                told = (json.loads(line[6:]) for line in followed.iter_lines() if line.startswith("data: "))
                assert any("summary" in each for each in told)
                with store_that_hangs(monkeypatch) as go_on:
                    place.running.service.catalog.changes.notify(ModelName.parse(MODEL))
                    begun = time.monotonic()
                    answers = list(pool.map(lambda _: http.get(path), range(40)))
                    assert {each.status_code for each in answers} == {503}
                    assert all("the store does not answer" in each.text for each in answers)
                    assert time.monotonic() - begun < 35, "40 at once, and not one after the other, for a second each"
                    assert any("store does not answer" in each.get("trouble", "") for each in told)
                    go_on.set()
                    assert next(each["trouble"] for each in told if "trouble" in each) == ""
            eventually(lambda: http.get(path).status_code == 200)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"/models/{MODEL}",
        f"/models/{MODEL}/versions/90",
        f"/models/{MODEL}/versions/91",
        f"/models/{MODEL}/compare?before=90&after=91",
        f"/models/{MODEL}/compare?before=90&after=1",
    ],
)
def test_clocks_and_figures_that_make_no_sense_are_shown_as_they_are(place: Place, path: str) -> None:
    answer = httpx.get(f"{place.url}{path}", timeout=60)
    assert answer.status_code == 200, answer.text
    assert ' width="-' not in answer.text
    assert ' x="-' not in answer.text


def test_long_names_fit_on_a_desk_and_on_a_phone_and_browsers_draw_all_of_it(
    place: Place, browser: Any, shots: Path
) -> None:
    paths = [
        "/", f"/models/{MODEL}", f"/models/{LONG}", f"/models/{LONG}/versions/1", f"/models/{MODEL}/versions/90",
        f"/models/{LONG}/retention", f"/models/{LONG}/compare?before=1&after=1", f"/models/{MODEL}/compare?before=90&after=91",
    ]  # fmt: skip
    with tab(browser, place.url, shots) as found:
        for path in paths:
            found.open(path)
            for width, height in ((1280, 860), PHONE):
                found.page.set_viewport_size({"width": width, "height": height})
                assert found.page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        assert found.problems == []
        found.open(f"/models/{MODEL}")
        shown = found.page.locator("tr:has(a.number:text-is('4')) td[data-label=Opened] time").text_content()
        assert shown.startswith("2090-"), "a moment that has not come is not just now"
        found.shot("13-long-names", size=PHONE)


def test_readers_that_never_read_keep_nobody_waiting(place: Place) -> None:
    split, path = urlsplit(place.url), f"/models/{MODEL}"
    with ExitStack() as open_ones, httpx.Client(base_url=place.url, timeout=60) as http:
        for _ in range(60):
            stuck = open_ones.enter_context(socket.create_connection((split.hostname, split.port)))
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.sendall(f"GET {path}/events HTTP/1.1\r\nHost: {split.hostname}\r\n\r\n".encode())
        reader = open_ones.enter_context(http.stream("GET", f"{path}/events"))
        told = (json.loads(line[6:]) for line in reader.iter_lines() if line.startswith("data: "))
        assert any("refs" in each for each in told)
        trainer = open_ones.enter_context(TrainerClient(place.running.address))
        for n in range(3):
            trainer.set_ref(MODEL, f"tag-{n}", 1)
            assert any(f"tag-{n}" in each.get("refs", "") for each in told)
