"""Output of commands: results, progress and errors, as text and tables for people, as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from weighbridge._core.text.plain import plain
from weighbridge.errors import WeighbridgeError

_WIDE = 10_000
"""Columns of a table that no terminal shows: wide enough that nothing is ever folded."""


def print_left_out(left_out: Mapping[str, int], *, err: bool = False) -> None:
    """Say what of a checkpoint was not taken, if there is anything: how many entries, by kind."""
    if left_out:
        what = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
        click.echo(f"left out, as they are no weights of the model: {what}", err=err)


def print_json(value: Any, *, one_line: bool = False) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=None if one_line else 2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, plain text where that is not a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(plain(str(cell), lines=True)) for cell in row)
        )  # as text: a name may look like markup
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_error(error: WeighbridgeError, *, as_json: bool) -> None:
    """What is wrong and what to do about it: on stderr, or as JSON on stdout."""
    if as_json:
        print_json(
            {
                "error": {
                    "reason": error.reason,
                    "message": error.message,
                    "fix": error.fix,
                    "details": list(error.details),
                }
            }
        )
    else:
        click.echo(f"Error: {plain(str(error), lines=True)}", err=True)


@contextmanager
def progress_bar(what: str, *, counted: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr while the block runs; none where that is not a terminal.

    Args:
        what: is being done.
        counted: whether it goes on in things instead of bytes.

    Yields:
        Call it with bytes, or things, done and in all.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *([MofNCompleteColumn()] if counted else [DownloadColumn(), TransferSpeedColumn()]),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def readable_time(unix_ms: int) -> str:
    """A time for people, in the local time zone; ``-`` for one that has not come."""
    return (
        datetime.fromtimestamp(unix_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        if unix_ms
        else "-"
    )
