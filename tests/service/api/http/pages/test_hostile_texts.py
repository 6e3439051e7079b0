"""Is what others have named shown as text, on every page, and does every page keep a browser from running anything but
our script?
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest

from tests.service.api.http.pages.conftest import Place, place_of
from tests.support.browser import tab
from tests.support.raw_clients import RawClient, cut, stream_of, whole_layout
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.engines.entries import Owner

MODEL = "acme/smol"
EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{ 1234 * 8 }}&amp;"
_QUOTED = quote(EVIL, safe="")
_IN_PATH = quote(EVIL.replace("/", ""), safe="")
PATHS = (
    "/",
    f"/?q={_QUOTED}",
    f"/models/{MODEL}",
    f"/models/{MODEL}/versions/1",
    f"/models/{MODEL}/versions/1?q={_QUOTED}",
    f"/models/{MODEL}/versions/2",
    f"/models/{MODEL}/versions/3",
    f"/models/{MODEL}/versions/{_IN_PATH}",
    f"/models/{MODEL}/retention",
    f"/models/{MODEL}/compare?before=1&after=1",
    f"/models/{MODEL}/compare?before={_QUOTED}&after={_QUOTED}",
    f"/models/{_IN_PATH}/x",
    "/login",
)


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service where runs, metadata, notes, errors and engines are called by a script."""
    with place_of(tmp_path_factory.mktemp("hostile")) as found:
        address, service = found.running.address, found.running.service
        with TrainerClient(address) as trainer, RawClient(address) as raw:
            trainer.register_files(MODEL, found.source.files)
            number = raw.open(MODEL, run=EVIL, metadata={"note": {"text": EVIL}}, candidate=True)
            layout = whole_layout(found.source.arrays)
            assigned = raw.declare(MODEL, number, layout)
            raw.push(MODEL, number, cut(stream_of(found.source.arrays, layout, assigned)))
            raw.seal(MODEL, number)
            eventually(lambda: service.catalog.get_version(MODEL, "1").state.stored)
            service.gates.approve_version(MODEL, 1, by=EVIL, note=EVIL)
            aborted = raw.open(MODEL, run=EVIL)
            service.intake.abort_version(MODEL, aborted, EVIL, 20.0)
            raw.open(MODEL, run=EVIL, step=9, ranks=2)
            spaceless = EVIL.replace(" ", "/")
            report = EngineReport(
                "e1", MODEL, "vllm", spaceless, "live", 1, state="failing", error=EVIL, host=spaceless
            )
            service.engines.report(Owner(), report)
        yield found


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_what_others_have_named_is_text(place: Place, path: str) -> None:
    answer = httpx.get(f"{place.url}{path}", timeout=30)
    assert answer.headers["content-type"].startswith("text/html"), answer.text
    elements = Elements(answer.text)
    for name, attributes in elements.found:
        assert name != "script" or attributes["src"].startswith("/assets/")  # type: ignore[union-attr]
        assert name not in ("style", "iframe", "object", "base", "meta-refresh")
        assert "style" not in attributes, f"{name} has a style of its own"
        assert not any(each.startswith("on") for each in attributes), f"{name} has a handler"
        assert attributes.get("src") != "x"
    assert "9872" not in elements.text, "no template is made of what it is given"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_is_shown_as_it_was_said(place: Place) -> None:
    model = Elements(httpx.get(f"{place.url}/models/{MODEL}").text).text
    assert model.count(EVIL) >= 4, "a run, an error, an engine and why it fails"
    version = Elements(httpx.get(f"{place.url}/models/{MODEL}/versions/1").text).text
    assert version.count(EVIL) >= 4, "run, metadata, who approved it and their note"


def test_a_browser_runs_none_of_it(place: Place, browser: Any, shots: Path) -> None:
    with tab(browser, place.url, shots) as opened:
        said: list[str] = []
        opened.page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        for path in PATHS:
            opened.page.goto(f"{place.url}{path}")
            # by the stream, too
            opened.page.evaluate("new Promise(done => setTimeout(done, 300))")
        assert said == []
        assert [each for each in opened.problems if "status of 4" not in each] == []


def test_a_file_of_a_model_is_no_page(place: Place) -> None:
    answer = httpx.get(f"{place.url}/{MODEL}/resolve/1/config.json")
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
