"""Suggestion for a name that does not exist: the one that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBERS = re.compile(r"\d+")
_SIMILAR = 0.6
"""From which likeness on a name may have been meant: difflib's own bound."""
_OTHER_LENGTH = 0.3
"""By how much less alike names with another number of parts are than their letters: they have to be nearly the same."""
_LOOKED_AT = 8


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?`` with the most similar of the names, to be appended to an error; empty if none is similar in all of its parts.

    Only names with the same numbers in them are considered: that of another layer, rank or version is another thing, not a slip.
    """
    numbers = _NUMBERS.findall(name)
    alike = [each for each in names if _NUMBERS.findall(each) == numbers]
    close = difflib.get_close_matches(name, alike, _LOOKED_AT, _SIMILAR)
    return question(_best(name, close, "."))


def model_meant(name: str, names: Iterable[str]) -> str:
    """The most similar of the names of models, ``namespace/name``; empty if none is. Both parts have to be similar, and numbers may differ."""
    return _best(name, names, "/")


def question(meant: str) -> str:
    """``; did you mean NAME?``, to be appended to an error; empty without a name."""
    return f"; did you mean {meant}?" if meant else ""


def _best(name: str, names: Iterable[str], separator: str) -> str:
    """The most similar of the names, if one is: long ones that share most of their parts are not, if one part is another word."""
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
