"""Numbers in the metadata of versions over the trainer's steps, as small pictures. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.metadata import by_trainer
from weighbridge._core.resources import Version
from weighbridge_service.api.http.pages.side_by_side.metadata_columns import (
    MOST_COLUMNS,
    Cell,
    cell_of,
    is_number,
)

WIDTH, HEIGHT = 300, 72
"""Width and height of a picture, in SVG user units."""
_MARGIN = 5
_FEWEST = 2
"""Minimum number of values for a picture."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a version: its position in the picture, and its text."""

    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of a number in metadata over steps.

    Attributes:
        key: the metadata key, as a cell.
        points: the points, in the order of their steps.
        line: the points, as the ``points`` attribute of an SVG polyline.
        least, greatest: the extreme values, as text.
        first, last: the least and the greatest step or version number.
        axis: ``step``, or ``version`` if several versions have the same step.
        text: a summary of the plot, as text.
    """

    key: Cell
    points: tuple[Point, ...]
    line: str
    least: str
    greatest: str
    first: int
    last: int
    axis: str
    text: str


def metadata_plots(versions: Sequence[Version]) -> tuple[Plot, ...]:
    """A plot of each number that at least two of these versions have; at most `MOST_COLUMNS` plots."""
    chosen = _keys(versions)
    by_step = len({version.step for version in versions}) == len(versions)
    found = []
    for key in chosen:
        values = {
            (version.step if by_step else version.number): float(value)
            for version in versions
            if key in version.metadata and is_number(value := version.metadata[key]) and not isinstance(value, str)
        }
        if len(values) >= _FEWEST:
            found.append(_plot(key, dict(sorted(values.items())), "step" if by_step else "version"))
    return tuple(found)


def _keys(versions: Sequence[Version]) -> list[str]:
    """Keys with numeric values: those that most versions have first, then by name."""
    counts: dict[str, int] = {}
    for version in versions:
        for key, value in by_trainer(version.metadata).items():
            if is_number(value):
                counts[key] = counts.get(key, 0) + 1
    return sorted(counts, key=lambda key: (-counts[key], key))[:MOST_COLUMNS]


def _plot(key: str, values: Mapping[int, float], axis: str) -> Plot:
    places = _scaled([float(place) for place in values], _MARGIN, WIDTH - _MARGIN)
    heights = _scaled(list(values.values()), HEIGHT - _MARGIN, _MARGIN)
    points = tuple(
        Point(x, y, f"{axis} {place}: {cell_of(value).text}")
        for x, y, (place, value) in zip(places, heights, values.items(), strict=True)
    )
    least, greatest = cell_of(min(values.values())).text, cell_of(max(values.values())).text
    first, last = min(values), max(values)
    said = (
        f"{cell_of(key).text} over {axis}s {first} to {last}: from {least} to {greatest}, last "
        f"{cell_of(list(values.values())[-1]).text}"
    )
    line = " ".join(f"{point.x},{point.y}" for point in points)
    return Plot(cell_of(key), points, line, least, greatest, first, last, axis, said)


def _scaled(values: Sequence[float], start: int, end: int) -> list[int]:
    """Values scaled to places from ``start`` to ``end``.

    Halves are subtracted, so that the difference of large values stays finite.
    """
    least, greatest = min(values), max(values)
    span = greatest / 2 - least / 2
    if not span or not math.isfinite(span):
        return [(start + end) // 2] * len(values)
    return [round(start + (end - start) * ((value / 2 - least / 2) / span)) for value in values]
