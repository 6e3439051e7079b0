"""How is a stored JSON document read without trusting it?

Every field must be there, have its type and lie within its bounds, and no other field may be there: a program that drops a
field it does not know, and writes the rest back, would lose what a newer one has written.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.names import shown

MAX_INTEGER = 2**63 - 1


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as compact ASCII text with sorted keys.

    Raises:
        InvalidArgument: it holds something that JSON does not have (NaN and bytes are such things).
    """
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"this cannot be written as JSON: {error}") from error


def decode(data: bytes, where: str) -> Fields:
    """The fields of a document whose text is one JSON object.

    Args:
        data: the text, UTF-8.
        where: what to call the document in errors.

    Raises:
        DataLoss: it is no JSON, no object, repeats a key or has a number that JSON does not have.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"{where} is not valid JSON: {error}") from error
    return Fields(value, where)


class Fields:
    """The fields of one JSON object, each taken once.

    Args:
        value: what should be an object.
        where: what to call it in errors.

    Raises:
        DataLoss: from every method, when the document is not what it should be.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise DataLoss(f"{where} is {shown(value)} where an object should be")
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
        value = self._take(name)
        if not isinstance(value, str):
            self._wrong(name, value, "a string")
        return value

    def array(self, name: str) -> list[Any]:
        """Take an array."""
        value = self._take(name)
        if not isinstance(value, list):
            self._wrong(name, value, "an array")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Take an object, whatever its fields."""
        value = self._take(name)
        if not isinstance(value, dict):
            self._wrong(name, value, "an object")
        return value

    def end(self) -> None:
        """Refuse what has not been taken."""
        if self._rest:
            raise DataLoss(
                f"{self.where} has the unknown field {shown(next(iter(self._rest)))}",
                fix="a newer version of Weighbridge may have written it: use that one",
            )

    def _take(self, name: str) -> Any:
        if name not in self._rest:
            raise DataLoss(f"{self.where} lacks the field {name!r}")
        return self._rest.pop(name)

    def _wrong(self, name: str, value: object, expected: str) -> NoReturn:
        raise DataLoss(f"{self.where} has {name!r} = {shown(value)} where {expected} should be")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
