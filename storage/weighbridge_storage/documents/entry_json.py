"""JSON of entries: objects of stored text, by the fields of their kinds. A field that has a default is left out where it has that value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from weighbridge.errors import DataLoss
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.entries import (
    Approval,
    FailedEntry,
    OpenEntry,
    ProtectionEntry,
    Ref,
    RequestEntry,
    VersionEntry,
)

Numbered = VersionEntry | OpenEntry | FailedEntry
Entry = Numbered | Ref | Approval | ProtectionEntry | RequestEntry
E = TypeVar("E", bound=Entry)
N = TypeVar("N", VersionEntry, OpenEntry, FailedEntry)


def to_json(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object."""
    document = dict(entry.extra)
    for item in fields(entry):
        value = getattr(entry, item.name)
        if item.name != "extra" and value != _default(item):
            document[item.name] = _value_to_json(value)
    return document


def _value_to_json(value: Any) -> Any:
    match value:
        case Approval():
            return to_json(value)
        case tuple():
            return [_value_to_json(each) for each in value]
    return value


def _default(item: Field[Any]) -> Any:
    """The value with which a field is left out; `MISSING` if there is none."""
    return item.default if item.default_factory is MISSING else item.default_factory()


_READERS: Mapping[Any, Callable[[strict_json.Fields, str], Any]] = {
    "str": strict_json.Fields.text,
    "int": strict_json.Fields.integer,
    "bool": strict_json.Fields.boolean,
    "tuple[str, ...]": strict_json.Fields.texts,
    "Metadata": strict_json.Fields.table,
    "tuple[Approval, ...]": lambda found, name: tuple(
        from_json(Approval, each, f"{found.where}, {name}[{i}]") for i, each in enumerate(found.array(name))
    ),
    "Approval | None": lambda found, name: from_json(Approval, found.table(name), f"{found.where}, {name}"),
}
"""How a field is read, by its type."""


def from_json(kind: type[E], value: object, where: str) -> E:
    """What `to_json` gave; ``where`` names it in errors.

    Raises:
        DataLoss: a field is missing, or has the wrong type.
        InvalidArgument: a value is out of bounds.
    """
    found = strict_json.Fields(value, where)
    values: dict[str, Any] = {
        item.name: _READERS[item.type](found, item.name)
        for item in fields(kind)
        if item.name != "extra" and (_default(item) is MISSING or item.name in found)
    }
    return kind(**values, extra=found.rest())


def list_to_json(entries: Mapping[int, Numbered]) -> list[dict[str, Any]]:
    """Entries by number as a JSON array, in the order of their numbers."""
    return [to_json(entries[number]) for number in sorted(entries)]


def list_from_json(kind: type[N], items: Iterable[object], where: str) -> dict[int, N]:
    """What `list_to_json` gave; raises as `from_json`, and if a number occurs twice."""
    found: dict[int, N] = {}
    for i, item in enumerate(items):
        entry = from_json(kind, item, f"{where}[{i}]")
        if entry.number in found:
            raise DataLoss(f"{where} lists version {entry.number} twice")
        found[entry.number] = entry
    return found
