"""Command that shows a service's activity live: top."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_drawn, print_json
from weighbridge._cli.running import Command, client_options, end_tidily
from weighbridge._cli.showing import completing

if TYPE_CHECKING:
    from rich.console import Console

    from weighbridge._cli.showing.gathering import Gatherer
    from weighbridge._cli.showing.overview import Overview, ServiceState

_SHARE = 0.25
"""Maximum fraction of time that is spent on reading a service: after a slow reading, the next one is delayed."""
_SECTIONS = 3
"""Lists that share the height of a terminal."""
_PLAIN_COLUMNS = 160
"""Width of the output without a terminal."""


@click.command("top", cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=completing.models)
@click.option(
    "--http",
    envvar="WEIGHBRIDGE_HTTP",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The service's HTTP address, for its memory.  [default: what the service reports]",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Print it once, and exit; this is the default without a terminal.")
@client_options
def top_command(
    models: tuple[str, ...], http: str | None, every: float, once: bool, server: str, as_json: bool
) -> None:
    """Show what a service does, live: pushes, versions, engines.

    Versions that are being received with the progress and rate of each rank, and who is missing; engines and what each
    serves; the newest versions with sizes and how long they took; refs; memory and bytes in flight. Only those of
    MODEL, if any is named. Ends with Ctrl-C. Goes on when the service is away and comes back.

    Memory is shown to those who may observe. --json prints one document.
    """
    from rich.console import Console

    from weighbridge._cli.showing.gathering import Gatherer

    console = Console(highlight=False)
    with Gatherer(server, http, models) as gatherer:
        first = gatherer.read()  # an unreachable service is an error now; later, the command waits for it
        if as_json or once or not console.is_terminal:
            seen = _once(gatherer, first, every)
            if as_json:
                print_json(seen)
            else:
                _print(console, seen)
        else:
            end_tidily()
            _live(console, gatherer, first, every)


def _once(gatherer: Gatherer, first: ServiceState, every: float) -> Overview:
    """One overview. If a version is being received, a second reading is made, so that the overview contains rates."""
    from weighbridge._cli.showing.overview import overview

    seen = overview(gatherer.server, None, first)
    if not seen.pushes:
        return seen
    time.sleep(every)
    return overview(gatherer.server, first, gatherer.read())


def _print(console: Console, seen: Overview) -> None:
    from rich.console import Console

    from weighbridge._cli.showing.screen import draw

    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_PLAIN_COLUMNS, highlight=False)
    print_drawn(console, draw(seen, console.width))


def _live(console: Console, gatherer: Gatherer, first: ServiceState, every: float) -> None:
    from rich.live import Live

    from weighbridge._cli.showing.screen import draw

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            for seen in _seen(gatherer, first, every):
                live.update(draw(seen, console.width, max(console.height // _SECTIONS, 1)), refresh=True)
        except KeyboardInterrupt:  # this is how it ends
            return


def _seen(gatherer: Gatherer, first: ServiceState, every: float) -> Iterator[Overview]:
    """Overviews, one after another. While the service is unreachable, they repeat the last reading."""
    from weighbridge._cli.showing.gathering import AWAY
    from weighbridge._cli.showing.overview import overview

    before, now = None, first
    away_since = 0.0
    reason = ""
    while True:
        away_s = time.monotonic() - away_since if away_since else 0.0
        yield overview(gatherer.server, before, now, away_s=away_s, away_reason=reason)
        begun = time.monotonic()
        time.sleep(every)
        try:
            asked = time.monotonic()
            found = gatherer.read()
        except AWAY as error:
            away_since = away_since or begun
            reason = error.message
            continue
        time.sleep(max((time.monotonic() - asked) / _SHARE - every, 0.0))
        before, now, away_since = (None if away_since else now), found, 0.0
