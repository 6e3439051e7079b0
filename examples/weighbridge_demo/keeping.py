"""Service of a demo that has passed, left running for a look until the demo is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from weighbridge_demo.report import Report
    from weighbridge_demo.service_process import ServiceProcess


class Kept:
    """Wait at the end of a demo's story: it prints where the service is, and returns when the demo is interrupted or
    the service ends.

    Nothing is kept of a demo in which something was not as it had to be.

    Args:
        report: report of the demo.
        print_report: writes it.
        temporary: whether the demo's folder is removed when it ends.

    Attributes:
        printed: whether the report has been written.
    """

    def __init__(self, report: Report, print_report: Callable[[], None], *, temporary: bool) -> None:
        self._report = report
        self._print_report = print_report
        self._temporary = temporary
        self.printed = False

    def __call__(self, service: ServiceProcess, server: str, http: str) -> None:
        """Wait.

        Args:
            service: runs.
            server: its gRPC address.
            http: its HTTP address.
        """
        if self._report.failures:
            return
        self._print_report()
        self.printed = True
        removed = f" and removes {service.log.parent}" if self._temporary else ""
        _say(
            f"The service keeps running. Its page: {http}/",
            f"  gRPC on {server}, documents of the HTTP API on {http}/docs",
            f"  versions in {service.store}, log in {service.log}",
            f"  for example: {_program()} versions {self._report.model} --server {server}",
            f"Ctrl-C ends it{removed}.",
        )
        with suppress(KeyboardInterrupt):
            service.wait()
        _say("", "The service ends.")


def say_how_to_keep(console: Console) -> None:
    """Write how the next run leaves its service for a look."""
    console.print(
        "Its service has ended. To look at its page and its versions, run it again and keep the service: "
        "make demo ARGS=--keep, or weighbridge demo --keep",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _program() -> str:
    """The command line of this environment, as it is typed in the folder that the demo runs in."""
    program = Path(sys.executable).with_name("weighbridge")
    with suppress(ValueError):
        program = program.relative_to(Path.cwd())
    return str(program)


def _say(*lines: str) -> None:
    """Lines on stderr, where they are not part of a JSON document."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
