"""Suggestion for a name that does not exist: the one that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBERS = re.compile(r"\d+")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?`` with the most similar of the names, to be appended to an error; empty if none is similar.

    Only names with the same numbers in them are considered: that of another layer, rank or version is another thing, not a slip.
    """
    numbers = _NUMBERS.findall(name)
    alike = [each for each in names if _NUMBERS.findall(each) == numbers]
    found = difflib.get_close_matches(name, alike, 1)
    return f"; did you mean {found[0]}?" if found else ""
