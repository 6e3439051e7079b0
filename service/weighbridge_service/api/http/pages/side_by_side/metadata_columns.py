"""Metadata of several versions as columns of a table: the keys that most versions have, and values short enough for a
cell. Pure.

Trainers may set up to 32 keys and 4096 bytes per version. The table always has few columns and short cells; the
version's own page shows all metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.engines.golden import readable_metadata
from weighbridge._core.metadata import MetadataValue, by_trainer
from weighbridge._core.resources import Version
from weighbridge._core.text.shortening import shortened

MOST_COLUMNS = 4
_LONGEST_CELL = 24
_LONGEST_TITLE = 200
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """A value in a table.

    Attributes:
        text: the value, shortened; empty if the version does not have it.
        title: a longer form, if the text is shortened.
        number: whether the value is a number.
    """

    text: str = ""
    title: str = ""
    number: bool = False


@dataclass(frozen=True, slots=True)
class MetadataColumns:
    """Columns with metadata of versions.

    Attributes:
        keys: key of each column, as a cell; its text is the column's title.
        cells: for each version, by its number, one cell per column.
        left_out: number of keys that have no column.
    """

    keys: tuple[Cell, ...]
    cells: dict[int, tuple[Cell, ...]]
    left_out: int


def metadata_columns(versions: Sequence[Version]) -> MetadataColumns:
    """The columns of these versions. Keys are sorted by the number of versions with a numeric value, then by the number
    with any value, then by name."""
    kept = {version.number: readable_metadata(by_trainer(version.metadata)) for version in versions}
    there = Counter(key for metadata in kept.values() for key in metadata)
    numbers = Counter(key for metadata in kept.values() for key, value in metadata.items() if is_number(value))
    ordered = sorted(there, key=lambda key: (-numbers[key], -there[key], key))
    keys = ordered[:MOST_COLUMNS]
    cells = {
        number: tuple(cell_of(metadata[key]) if key in metadata else Cell() for key in keys)
        for number, metadata in kept.items()
    }
    return MetadataColumns(tuple(_short(key) for key in keys), cells, len(ordered) - len(keys))


def cell_of(value: MetadataValue) -> Cell:
    """A value as a cell."""
    if isinstance(value, bool):
        return Cell("true" if value else "false")
    if isinstance(value, str):
        return _short(value)
    text = f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
    return Cell(text, "" if text == repr(value) else repr(value), number=True)


def is_number(value: MetadataValue) -> bool:
    """Whether a value is a number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(text: str) -> Cell:
    cut = shortened(text, _LONGEST_CELL)
    return Cell(cut, "" if cut == text else shortened(text, _LONGEST_TITLE))
