"""JSON form of entries. The fields of an entry's class determine its JSON object.

A field with its default value is omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from typing import Any, ClassVar, Protocol, TypeVar

from weighbridge._core.text.shortening import shown
from weighbridge.errors import DataLoss
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.entries import Approval, FailedEntry, OpenEntry, VersionEntry


class Stored(Protocol):
    """A dataclass that is stored."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Entry(Stored, Protocol):
    """A stored dataclass that keeps fields of later releases."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that this release does not know."""


Numbered = VersionEntry | OpenEntry | FailedEntry
Reader = Callable[[strict_json.Fields, str], Any]
E = TypeVar("E", bound=Entry)
N = TypeVar("N", VersionEntry, OpenEntry, FailedEntry)


def to_json(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object."""
    return {**entry.extra, **fields_to_json(entry)}


def fields_to_json(value: Stored, *, whole: bool = False) -> dict[str, Any]:
    """The fields of a dataclass by name. Fields with their default values are omitted, unless ``whole`` is set."""
    found = {name: (getattr(value, name), default) for name, default, _ in _fields(type(value))}
    return {name: _value_to_json(got) for name, (got, default) in found.items() if whole or got != default}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value_to_json(each) for each in value]
    return to_json(value) if hasattr(value, "extra") else value


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any, Reader], ...]:
    """The stored fields of a kind of entry: name, default or `MISSING`, and reader."""
    return tuple((item.name, _default(item), _READERS[str(item.type)]) for item in fields(kind) if item.name != "extra")


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


_READERS: dict[str, Reader] = {
    "str": strict_json.Fields.text,
    "int": strict_json.Fields.integer,
    "bool": strict_json.Fields.boolean,
    "tuple[str, ...]": strict_json.Fields.texts,
    "Metadata": strict_json.Fields.table,
    "tuple[Approval, ...]": lambda found, name: tuple(
        from_json(Approval, each, f"{found.where}, {name}[{i}]") for i, each in enumerate(found.array(name))
    ),
}
"""Reader of a field, by its type."""


def nested(kind: type[E]) -> type[E]:
    """Class decorator: allows entries to have a field of this kind or None."""
    _READERS[f"{kind.__name__} | None"] = partial(nullable, kind)
    return kind


def nullable(kind: type[E], found: strict_json.Fields, name: str) -> E | None:
    """The entry in a field; None if the field is null. Raises as `from_json`."""
    value = found.nullable_table(name)
    return None if value is None else from_json(kind, value, f"{found.where}, {name}")


def from_json(kind: type[E], value: object, where: str) -> E:
    """The entry in a JSON object from `to_json`. ``where`` names the object in errors.

    Raises:
        DataLoss: a field is missing, or has the wrong type.
        InvalidArgument: a value is out of bounds.
    """
    found = strict_json.Fields(value, where)
    values = fields_from_json(kind, found)
    return kind(**(values | {"extra": found.rest()}))


def fields_from_json(kind: type[Stored], found: strict_json.Fields, *, whole: bool = False) -> dict[str, Any]:
    """Field values in a JSON object from `fields_to_json`. With ``whole``, every field must be present.

    Raises as `from_json`.
    """
    return {
        name: read(found, name) for name, default, read in _fields(kind) if whole or default is MISSING or name in found
    }


def named_to_json(entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """Entries by name as a JSON object."""
    return {name: to_json(entry) for name, entry in entries.items()}


def named_from_json(kind: type[E], items: Mapping[str, object], where: str) -> dict[str, E]:
    """The entries, by name, in a JSON object from `named_to_json`. Raises as `from_json`."""
    return {name: from_json(kind, item, f"{where} {shown(name)}") for name, item in items.items()}


def list_to_json(entries: Mapping[int, Numbered]) -> list[dict[str, Any]]:
    """Entries by number as a JSON array, in the order of their numbers."""
    return [to_json(entries[number]) for number in sorted(entries)]


def list_from_json(kind: type[N], items: Iterable[object], where: str) -> dict[int, N]:
    """The entries, by number, in a JSON array from `list_to_json`.

    Raises as `from_json`, and DataLoss if a number occurs twice.
    """
    found: dict[int, N] = {}
    for i, item in enumerate(items):
        entry = from_json(kind, item, f"{where}[{i}]")
        if entry.number in found:
            raise DataLoss(f"{where} lists version {entry.number} twice")
        found[entry.number] = entry
    return found


nested(Approval)
