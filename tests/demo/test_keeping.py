"""Does a demo that keeps its service print its address, wait, and end on an interrupt?"""

from __future__ import annotations

from pathlib import Path

import pytest

from weighbridge_demo.keeping import Kept
from weighbridge_demo.report import Report


class Service:
    """A service whose `wait` ends with Ctrl-C."""

    store = Path("/demo/store")
    log = Path("/demo/service.log")
    waited = 0

    def wait(self) -> int:
        self.waited += 1
        raise KeyboardInterrupt


def test_the_addresses_are_printed_below_the_report_and_an_interrupt_ends_the_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service, written = Service(), list[str]()
    kept = Kept(Report(model="acme/smol"), lambda: written.append("report"), temporary=True)
    kept(service, "127.0.0.1:1", "http://127.0.0.1:2")  # type: ignore[arg-type]
    out, said = capsys.readouterr()
    assert (service.waited, kept.printed, written, out) == (1, True, ["report"], "")
    assert "Its page: http://127.0.0.1:2/\n" in said
    assert "weighbridge versions acme/smol --server 127.0.0.1:1\n" in said
    assert "Ctrl-C ends it and removes /demo.\n" in said
    assert said.endswith("The service ends.\n")


def test_a_demo_that_has_failed_keeps_nothing() -> None:
    service, report = Service(), Report()
    report.check("two is three", passed=False)
    kept = Kept(report, lambda: None, temporary=False)
    kept(service, "127.0.0.1:1", "http://127.0.0.1:2")  # type: ignore[arg-type]
    assert (service.waited, kept.printed) == (0, False)
