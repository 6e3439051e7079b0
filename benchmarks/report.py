"""Report of figures, for people and for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Figures

_COLUMNS = (
    # heading, seconds or ratio by name
    ("copy s", "copy"),
    ("held s", "held"),
    ("/copy", "held_to_copy"),
    ("ready s", "ready"),
    ("/copy", "ready_to_copy"),
    ("sealed s", "sealed"),
    ("stream s", "stream"),
    ("/raw", "stream_to_raw"),
    ("durable s", "durable"),
    ("cpu s", "push_processor"),
    ("pull s", "pull"),
    ("/copy", "pull_to_copy"),
    ("/raw", "pull_to_raw"),
    ("cpu s", "pull_processor"),
    ("view s", "view"),
)


def machine() -> dict[str, object]:
    """Machine and checkout of the figures."""
    return {
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of this checkout, with ``-dirty`` if it has been changed since; empty if there is none."""
    line = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_json(path: Path, **content: Any) -> None:
    """Write figures, and what they were measured on."""
    path.write_text(json.dumps({"machine": machine(), **content}, indent=2) + "\n")


def next_to_plain(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Times of an adapter compared with plain pushes of the same tensors.

    Args:
        of_ranks: for each rank, the seconds of each round, by way: ``adapter`` and ``plain``. The first round makes
            memory for versions, and does not count.

    Returns:
        Medians of both ways, of the rank that takes longest in each round, and ``ratio``, the median of the rounds'
        ratios.
    """
    ways = {
        way: [max(of_round) for of_round in zip(*(each[way] for each in of_ranks), strict=True)][1:]
        for way in ("adapter", "plain")
    }
    ratios = [adapter / plain for adapter, plain in zip(ways["adapter"], ways["plain"], strict=True)]
    return {
        **{way: statistics.median(each) for way, each in ways.items()},
        "ratio": statistics.median(ratios),
    }


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under headings; the first column to the left, the others to the right."""
    cells = [list(headings), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def cases_table(all_figures: Sequence[Figures]) -> str:
    """Times and ratios of each case, and below them bytes and memory."""
    times = table(
        ["GB, clients, cut, lane", *(heading for heading, _ in _COLUMNS)],
        ([name_of(f), *(_value(f, name) for _, name in _COLUMNS)] for f in all_figures),
    )
    sizes = table(
        ["", "model MB", "pushed MB", "pulled MB", "same bytes", *("service MB", "trainer MB", "engine MB", "together MB")],
        (
            [
                name_of(f),
                *(_megabytes(f.nbytes.get(name)) for name in ("model", "pushed", "pulled")),
                {True: "yes", False: "NO", None: "-"}[f.verified],
                *(_megabytes(f.memory.get(name)) for name in ("service", "trainer", "engine", "together")),
            ]
            for f in all_figures
        ),
    )  # fmt: skip
    return f"{times}\n\n{sizes}"


def name_of(figures: Figures) -> str:
    """The case, and the lanes that were taken."""
    case = figures.case
    return f"{case.gigabytes:g}, {case.clients}, {case.cut}, {'+'.join(sorted(figures.lanes)) or case.lane}"


def _value(figures: Figures, name: str) -> str:
    is_ratio = "_to_" in name
    value = figures.ratio(name) if is_ratio else figures.median(name)
    return seconds(value) if not is_ratio else "-" if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """Seconds with three digits that say something."""
    return "-" if value is None else f"{value:.{3 if value < 1 else 2}f}"


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.0f}"
