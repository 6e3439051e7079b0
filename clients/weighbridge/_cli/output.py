"""Output of commands: results, progress and errors, as text and tables for people and as JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from weighbridge._core.json_values import json_value
from weighbridge._core.text.plain import plain
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import WeighbridgeError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDE = 10_000
"""Width without a terminal: wide enough that no line is ever folded."""
_APART = 2
"""Space between the columns of a table."""


def say(*lines: str, err: bool = False) -> None:
    """Print lines to stdout or stderr.

    Strings from other sources in them, such as names and reasons, are escaped, so that they contain neither terminal
    control sequences nor line breaks.
    """
    click.echo("\n".join(map(plain, lines)), err=err)


def print_left_out(left_out: Mapping[str, int], *, err: bool = False) -> None:
    """Report how many entries of a checkpoint were left out, by kind; prints nothing if there are none."""
    if left_out:
        what = ", ".join(f"{kind}: {count}" for kind, count in left_out.items())
        say(f"left out, as they are not weights of the model: {what}", err=err)


def print_result(found: Any, as_json: bool, *lines: str, one_line: bool = False) -> None:
    """Print the result of a command to stdout.

    Args:
        found: the result for programs, as for `print_json`.
        as_json: whether ``--json`` was given.
        lines: the result for people.
        one_line: whether the document is one of several.
    """
    if as_json:
        print_json(found, one_line=one_line)
    else:
        say(*lines)


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print one JSON document to stdout, of values and of dataclasses that are `JsonValue`.

    Terminal control sequences in its strings are escaped.
    """
    text = json.dumps(json_value(value), indent=None if one_line else 2, ensure_ascii=False)
    if not text.isprintable():
        text = "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
    click.echo(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, below: Collection[str] = ()) -> None:
    """Print a table to stdout, as plain text if stdout is not a terminal.

    Args:
        columns: titles of the columns.
        rows: one cell per column.
        below: columns that are printed below each row, as text, if the terminal is too narrow for all of them.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    cells = [[plain(str(cell), lines=True) for cell in row] for row in rows]
    natural = [
        max(cell_len(line) for cell in (title, *column) for line in cell.split("\n"))
        for title, *column in zip(columns, *cells, strict=True)
    ]
    fits = sum(natural) + _APART * (len(columns) - 1) <= console.width
    inside = [index for index, title in enumerate(columns) if fits or title not in below]
    outside = [index for index in range(len(columns)) if index not in inside]
    widths = _fitted([natural[index] for index in inside], console.width - _APART * (len(inside) - 1))

    def grid(row: Sequence[str], style: str = "") -> Table:
        made = Table.grid(padding=(0, _APART, 0, 0))
        for width in widths:
            made.add_column(width=width, overflow="fold")
        made.add_row(*(Text(row[index], style) for index in inside))  # as text: a name may look like markup
        return made

    drawn: list[RenderableType] = [grid(columns, "bold")]
    for row in cells:
        drawn.append(grid(row))
        said = [f"{columns[index].lower()}: {row[index]}" for index in outside if row[index] not in ("", "-")]
        if said:
            drawn.append(Padding(Text("; ".join(said)), (0, 0, 0, _APART)))
    print_drawn(console, *drawn)


def print_drawn(console: Console, *drawn: RenderableType) -> None:
    """Print renderables of rich to stdout, without trailing spaces. Their strings must have passed `plain` already."""
    with console.capture() as captured:
        console.print(*drawn, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _fitted(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit into the given width: the widest columns are reduced, all to the same width."""
    most = max(natural, default=0)
    while most > 1 and sum(min(width, most) for width in natural) > room:
        most -= 1
    return [min(width, most) for width in natural]


def print_error(error: WeighbridgeError, *, as_json: bool) -> None:
    """Print an error and what to do about it: to stderr, or as JSON to stdout."""
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
        fix = [f"  What to do: {error.fix}"] if error.fix else []
        parts = (f"Error: {error.message}", *(f"  - {each}" for each in error.details), *fix)
        say(*(line for part in parts for line in part.replace("\n", "\n    ").split("\n")), err=True)


class PlainFormatter(logging.Formatter):
    """Formatter of log records that escapes terminal control sequences."""

    def format(self, record: logging.LogRecord) -> str:
        """The message of a record, with its traceback if there is one."""
        return plain(super().format(record), lines=True)


@contextmanager
def progress_bar(what: str, *, counted: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr while the block runs; none if stderr is not a terminal.

    Args:
        what: name of the work.
        counted: whether progress is counted in items instead of bytes.

    Yields:
        A function to call with the bytes or items done, and the total.
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
        task = progress.add_task(plain(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def progress_phases(what: str, first: str) -> Iterator[Callable[[str, int, int], None]]:
    """A line on stderr that shows the current phase and its duration while the block runs; no line if stderr is not a
    terminal.

    Args:
        what: name of the work.
        first: its first phase.

    Yields:
        A function to call with a phase, its bytes done, and their total; 0 and 0 for a phase without a byte count.
    """
    if not sys.stderr.isatty():
        yield lambda _phase, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(plain(f"{what}: {first}"), total=None, amount="")

        def update(phase: str, done: int, total: int) -> None:
            amount = f"{readable_size(done)} of {readable_size(total)}" if total else ""
            progress.update(
                task,
                description=plain(f"{what}: {phase}"),
                completed=done,
                total=total or None,
                amount=amount,
            )

        yield update


def readable_time(unix_ms: int) -> str:
    """A readable time in the local time zone; ``-`` if the event has not happened."""
    return datetime.fromtimestamp(unix_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z") if unix_ms else "-"
