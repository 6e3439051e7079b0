"""A real Chromium, driven by Playwright, that reaches nothing but this machine; and pages of a service in it.

Tests that ask for it are skipped where either is missing: `make test-page` installs Playwright and axe, the
distribution has Chromium.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".page-tools" / "node_modules" / "axe-core" / "axe.min.js"
PHONE, DESK = (390, 844), (1280, 860)
_LATE_MS = 15_000
"""Milliseconds after which a page counts as not showing something.

The promise is a second, on a machine that has nothing else to do.
"""


def chromium() -> str:
    """Path of the browser; skips the test if there is none."""
    found = os.environ.get("WEIGHBRIDGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


@contextmanager
def running_browser() -> Iterator[Any]:
    """The browser. Names of other hosts lead nowhere."""
    playwright = pytest.importorskip("playwright.sync_api", reason="make test-page installs Playwright")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=chromium(),
            args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"],
        )
        yield launched
        launched.close()


@dataclass
class Tab:
    """A page that is open, and what went wrong in it.

    Attributes:
        page: Playwright's.
        url: URL of the service.
        shots: folder for screenshots.
        problems: messages of the console, errors of scripts, and requests to other hosts.
        seen: seconds until something was seen, by what it was.
    """

    page: Any
    url: str
    shots: Path
    problems: list[str] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda asked: self._check(asked.url))

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.problems.append(f"asks {url}")

    def open(self, path: str) -> Any:
        """Open an address, and wait until it is live; its answer."""
        answer = self.page.goto(f"{self.url}{path}")
        if self.page.locator("#live").count():
            self.page.locator("#live.on").wait_for(timeout=_LATE_MS)
        return answer

    def shows(self, selector: str, text: str = "", *, since: float | None = None) -> None:
        """Wait until something is to be seen, without loading the page again; ``since`` when, it could have been."""
        begun = time.monotonic() if since is None else since
        found = self.page.locator(selector, has_text=text) if text else self.page.locator(selector)
        found.first.wait_for(timeout=_LATE_MS)
        self.seen[f"{selector} {text}".strip()] = time.monotonic() - begun

    def shot(self, name: str, *, dark: bool = False, size: tuple[int, int] = DESK, whole: bool = True) -> Path:
        """A screenshot."""
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=path, full_page=whole)
        self.page.set_viewport_size({"width": DESK[0], "height": DESK[1]})
        self.page.emulate_media(color_scheme="light")
        return path

    def violations(self) -> list[str]:
        """Serious and critical findings of axe."""
        if not AXE.exists():
            pytest.skip("there is no axe: make test-page")
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes'][:3]]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def tab(browser: Any, url: str, shots: Path, **settings: Any) -> Iterator[Tab]:
    """A tab in a profile of its own."""
    context = browser.new_context(viewport={"width": DESK[0], "height": DESK[1]}, **settings)
    opened = Tab(context.new_page(), url, shots)
    yield opened
    context.close()
