"""Suggestion for a name that does not exist: the name that the user probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBERS = re.compile(r"\d+")
_SIMILAR = 0.6
"""Minimum similarity of a suggested name; difflib's default."""
_OTHER_LENGTH = 0.3
"""Amount subtracted from the similarity of names that have a different number of parts: such names must be nearly the
same.
"""
_LOOKED_AT = 8


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the most similar name, to append to an error; empty if no name is similar in
    all of its parts.

    Only names that contain the same numbers are considered: a name of another layer, rank or version is not a typing
    error.
    """
    numbers = _NUMBERS.findall(name)
    alike = [each for each in names if _NUMBERS.findall(each) == numbers]
    close = difflib.get_close_matches(name, alike, _LOOKED_AT, _SIMILAR)
    return question(_best(name, close, "."))


def model_meant(name: str, names: Iterable[str]) -> str:
    """Return the most similar model name, ``namespace/name``; empty if no name is similar. Both parts must be similar,
    and numbers may differ.
    """
    return _best(name, names, "/")


def question(meant: str) -> str:
    """Return ``; did you mean NAME?``, to append to an error; empty without a name."""
    return f"; did you mean {meant}?" if meant else ""


def _best(name: str, names: Iterable[str], separator: str) -> str:
    """Return the most similar name, if one is similar. Long names that share most of their parts are not similar if one
    part is a different word.
    """
    parts = name.split(separator)

    def likeness(other: str) -> float:
        others = other.split(separator)
        if len(others) != len(parts):
            return difflib.SequenceMatcher(None, name, other).ratio() - _OTHER_LENGTH
        return min(map(_likeness, parts, others))

    best = max(names, key=likeness, default="")
    return best if best and likeness(best) >= _SIMILAR else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
