"""Strict reader and writer of stored JSON documents. The reader does not trust its input.

Every known field must be present, have the right type and be within its bounds. The caller decides about fields that
this release does not know: `Fields.rest` keeps them, so that they are written back with the others, and `Fields.end`
rejects them. A document states what its reader must understand: its ``format``, and the features that it ``requires``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from weighbridge._core.text.shortening import shown
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument

MAX_INTEGER = 2**63 - 1

T = TypeVar("T")


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as compact ASCII text with sorted keys.

    Raises:
        InvalidArgument: it contains a value that JSON cannot express, such as NaN or bytes.
    """
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"this cannot be written as JSON: {error}") from error


def decode(data: bytes, where: str) -> Fields:
    """The fields of a document whose text is one JSON object.

    Args:
        data: the text, UTF-8.
        where: name of the document in errors.

    Raises:
        DataLoss: the text is not JSON or not an object, repeats a key, or contains a number that JSON does not allow.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"{where} is not valid JSON: {error}") from error
    return Fields(value, where)


@contextmanager
def malformed_as_data_loss(where: str) -> Iterator[None]:
    """Convert errors about a value of a document to DataLoss. ``where`` names the document."""
    try:
        yield
    except InvalidArgument as error:
        raise DataLoss(f"{where} is malformed: {error.message}") from error


class Fields:
    """The fields of one JSON object. Each is taken once.

    Args:
        value: value that should be an object.
        where: name of the object in errors.

    Raises:
        DataLoss: from every method, if the document is malformed.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise DataLoss(f"{where} is {shown(value)}, not an object")
        self._rest: dict[str, Any] = dict(value)
        self.where = where

    @property
    def names(self) -> list[str]:
        """Names of the fields not taken yet."""
        return list(self._rest)

    def integer(self, name: str, minimum: int = 0) -> int:
        """Take an integer from ``minimum`` to `MAX_INTEGER`."""
        value = self._take(name)
        # bool is a subclass of int.
        if type(value) is not int or not minimum <= value <= MAX_INTEGER:
            self._wrong(name, value, f"an integer from {minimum}")
        return value

    def text(self, name: str) -> str:
        """Take a string."""
        return self._typed(name, str, "a string")

    def boolean(self, name: str) -> bool:
        """Take ``true`` or ``false``."""
        return self._typed(name, bool, "true or false")

    def texts(self, name: str) -> tuple[str, ...]:
        """Take an array of strings."""
        value = self.array(name)
        if not all(isinstance(each, str) for each in value):
            self._wrong(name, value, "an array of strings")
        return tuple(value)

    def array(self, name: str) -> list[Any]:
        """Take an array."""
        return self._typed(name, list, "an array")

    def table(self, name: str) -> dict[str, Any]:
        """Take an object with any fields."""
        return self._typed(name, dict, "an object")

    def nullable_table(self, name: str) -> dict[str, Any] | None:
        """Take an object with any fields, or null."""
        if self._rest.get(name, ()) is None:
            return self._rest.pop(name)  # type: ignore[no-any-return]
        return self.table(name)

    def __contains__(self, name: str) -> bool:
        """Whether a field is present and has not been taken."""
        return name in self._rest

    def check_format(self, current: int) -> None:
        """Take ``format``.

        Raises:
            FailedPrecondition: it is not ``current``.
        """
        found = self.integer("format", 1)
        if found != current:
            raise FailedPrecondition(
                f"{self.where} has format {found}, and this Weighbridge reads format {current}",
                fix=f"use a Weighbridge that reads format {found}",
            )

    def required(self, known: frozenset[str]) -> tuple[str, ...]:
        """Take ``requires``: names of features that a program must know to understand the document or to change it
        safely.

        Args:
            known: the features that the reader has.

        Raises:
            FailedPrecondition: it requires other features. The error names them.
        """
        names = self.texts("requires")
        if lacking := sorted(set(names) - known):
            raise FailedPrecondition(
                f"{self.where} requires {', '.join(map(shown, lacking[:5]))}, which this Weighbridge does not support",
                fix="use a newer Weighbridge",
            )
        return names

    def rest(self) -> dict[str, Any]:
        """Take all fields that have not been taken: those that this release does not know."""
        rest, self._rest = self._rest, {}
        return rest

    def end(self) -> None:
        """Raise DataLoss if a field has not been taken."""
        if self._rest:
            raise DataLoss(
                f"{self.where} has the unknown field {shown(next(iter(self._rest)))}",
                fix="a newer version of Weighbridge may have written it: use that one",
            )

    def _take(self, name: str) -> Any:
        if name not in self._rest:
            raise DataLoss(f"{self.where} lacks the field {name!r}")
        return self._rest.pop(name)

    def _typed(self, name: str, kind: type[T], expected: str) -> T:
        value = self._take(name)
        if not isinstance(value, kind):
            self._wrong(name, value, expected)
        return value

    def _wrong(self, name: str, value: object, expected: str) -> NoReturn:
        raise DataLoss(f"{self.where} has {name!r} = {shown(value)}, not {expected}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
