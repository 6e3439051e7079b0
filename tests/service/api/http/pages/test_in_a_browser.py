"""Are the pages accessible: by keyboard, with a screen reader, in dark and light, on a phone, without script and
without other hosts?
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.api.http.pages.conftest import Place, place_of
from tests.service.api.http.web import held_at
from tests.support.browser import PHONE, Tab, tab
from tests.support.identities import identity, policy_file
from tests.support.raw_clients import RawClient
from tests.support.waiting import eventually
from weighbridge import Credentials, TrainerClient
from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.access import tokens
from weighbridge_service.access.peer import Peer
from weighbridge_service.engines.entries import Owner

MODEL = "acme/smol"
PATHS = (
    "/",
    f"/models/{MODEL}",
    f"/models/{MODEL}/versions/1",
    f"/models/{MODEL}/versions/3",
    f"/models/{MODEL}/versions/99",
    f"/models/{MODEL}/retention",
    f"/models/{MODEL}/compare?before=1&after=3",
    "/?q=nothing",
)


@pytest.fixture(scope="module")
def token() -> str:
    return tokens.new_token()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, token: str) -> Iterator[Place]:
    """A service with a policy and at least one event of every kind."""
    folder = tmp_path_factory.mktemp("used")
    named = ["admin", "tag:acme/*@prod"]
    asking = tokens.new_token()
    policy = policy_file(
        folder,
        identity("me", [*named, "approve:acme/*@prod"], token=token),
        identity("trainer", named, token=asking),
    )
    with place_of(folder, policy=policy) as found:
        service, shown = found.running.service, Credentials(token=asking, insecure=True)
        with TrainerClient(found.running.address, credentials=shown) as trainer:
            for step in (1, 2):
                trainer.import_folder(MODEL, found.source.folder, step=step, candidate=step == 2).wait(timeout=60)
            trainer.set_ref(MODEL, "canary", 1)
            trainer.protect_ref(MODEL, "prod", approvals=1)
            trainer.request_ref(MODEL, "prod", 1, note="it is good")
        with RawClient(found.running.address, shown) as raw:
            raw.open(MODEL, step=3, ranks=4)
        for kind, version, state in (("vllm", 1, "serving"), ("sglang", 0, "failing")):
            said = EngineReport(kind, MODEL, kind, f"http://node-{kind}:8000", "latest", version, state=state)
            service.engines.report(Owner(), said)
        yield found


@pytest.fixture
def opened(browser: Any, place: Place, shots: Path, token: str) -> Iterator[Tab]:
    """A tab in which a user has signed in."""
    with tab(browser, place.url, shots) as found:
        found.page.goto(f"{place.url}/models/{MODEL}")
        found.page.locator("#token").fill(token)
        found.page.get_by_role("button", name="Sign in").click()
        found.page.locator("#live.on").wait_for()
        found.problems.clear()  # that the first page was refused
        yield found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_checker_of_accessibility_finds_nothing_serious(opened: Tab, dark: bool) -> None:
    opened.page.emulate_media(color_scheme="dark" if dark else "light")
    found = {}
    for path in PATHS:
        opened.page.goto(f"{opened.url}{path}")
        for summary in opened.page.locator("summary").all():
            summary.click()
        found[path] = opened.violations()
    opened.page.get_by_role("button", name="Sign out").click()
    found["/login"] = opened.violations()
    assert [each for each in found.items() if each[1]] == []


@pytest.mark.parametrize("path", PATHS)
def test_a_phone_shows_everything_in_its_width(opened: Tab, path: str) -> None:
    opened.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    opened.page.goto(f"{opened.url}{path}")
    wide = opened.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE[0]


def test_a_request_is_approved_by_keyboard_alone(place: Place, opened: Tab) -> None:
    page, refs = opened.page, place.running.service.catalog.refs
    opened.shot("10-signed-in")
    opened.shot("10-signed-in-phone", size=PHONE)
    assert "prod" not in refs(MODEL)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Approve":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "who uses a keyboard sees where they are"
    page.keyboard.press("Enter")
    page.locator("li:has(.ref:text-is('prod')) .number", has_text="1").wait_for()
    assert refs(MODEL)["prod"] == 1
    assert opened.problems == []


def test_an_export_is_begun_followed_and_ended(opened: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    page = opened.page
    with held_at(monkeypatch, 0.5) as go_on:
        page.locator("#new-export summary").click()
        page.locator("#export-dtype").select_option("bf16")
        page.get_by_role("button", name="Export", exact=True).click()
        opened.shows(".exports .meter .num", "%")
        page.locator(".exports .state", has_text="running").wait_for()
        opened.shot("12-exporting")
        go_on.set()
        opened.shows(".exports .state", "done")
    with held_at(monkeypatch, 0.5) as go_on:
        page.locator("#new-export summary").click()
        page.get_by_role("button", name="Export", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        go_on.set()
        opened.shows(".exports .state", "cancelled")
    assert opened.problems == []


def test_what_somebody_is_typing_outlives_a_change(place: Place, opened: Tab) -> None:
    page = opened.page
    page.locator("#new-tag summary").click()
    page.locator("#new-ref").fill("half-a-na")
    page.locator("#new-version").select_option("1")
    place.running.service.gates.move(MODEL, "other", "1", Peer("me"))
    page.locator(".refline .ref", has_text="other").wait_for()
    assert page.locator("#new-ref").input_value() == "half-a-na"
    assert page.evaluate("document.activeElement.id") in ("new-ref", "new-version")
    page.locator("#new-ref").press("End")
    page.keyboard.type("me")
    assert page.locator("#new-ref").input_value() == "half-a-name"


def test_pages_work_without_script(browser: Any, place: Place, shots: Path, token: str) -> None:
    with tab(browser, place.url, shots, java_script_enabled=False) as plain:
        plain.page.goto(f"{place.url}/models/{MODEL}")
        plain.page.locator("#token").fill(token)
        plain.page.get_by_role("button", name="Sign in").click()
        plain.page.locator("#new-tag summary").click()
        plain.page.locator("#new-ref").fill("plain")
        plain.page.get_by_role("button", name="Tag", exact=True).click()
        plain.page.locator(".refline .ref", has_text="plain").wait_for()
    assert place.running.service.catalog.refs(MODEL)["plain"] >= 1


def test_a_page_says_that_the_service_is_gone_and_goes_on_when_it_is_back(
    browser: Any, tmp_path: Path, shots: Path
) -> None:
    with place_of(tmp_path) as there, tab(browser, there.url, shots) as opened:
        opened.open("/")
        opened.page.context.set_offline(True)
        there.running.service.catalog.stopping.set()  # ends the streams
        opened.page.locator("#lost").wait_for(timeout=30_000)
        assert "cannot be reached" in opened.page.locator("#lost").text_content()
        assert opened.page.locator("#live-text").text_content() == "not live"
        opened.shot("11-lost")
        there.running.service.catalog.stopping.clear()
        opened.page.context.set_offline(False)
        opened.page.locator("#live.on").wait_for(timeout=30_000)
        eventually(lambda: opened.page.locator("#lost").is_hidden())
