"""Suggestion for a name that does not exist: the one that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBERS = re.compile(r"\d+")
_SIMILAR = 0.6
"""From which likeness on a name may have been meant: difflib's own bound."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?`` with the most similar of the names, to be appended to an error; empty if none is similar.

    Only names with the same numbers in them are considered: that of another layer, rank or version is another thing, not a slip.
    """
    numbers = _NUMBERS.findall(name)
    alike = [each for each in names if _NUMBERS.findall(each) == numbers]
    found = difflib.get_close_matches(name, alike, 1, _SIMILAR)
    return f"; did you mean {found[0]}?" if found else ""


def model_meant(name: str, names: Iterable[str]) -> str:
    """As `did_you_mean`, for names of models, ``namespace/name``: both parts have to be similar, and numbers may differ."""
    parts = name.split("/")

    def likeness(other: str) -> float:
        return min(map(_likeness, parts, other.split("/")), default=0.0)

    best = max(names, key=likeness, default="")
    return f"; did you mean {best}?" if best and likeness(best) >= _SIMILAR else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
