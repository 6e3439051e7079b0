"""Entries of a model's history: versions in each of their states, and refs, as objects of stored JSON text.

An entry keeps the fields of its object that this release does not know, and writes them back (`extra`). A field that has a default is
left out where it has that value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from weighbridge._core.metadata import Metadata, checked_metadata
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import MAX_VERSION, shown

MAX_TEXT = 256
MAX_REASONS = 16
"""Most reasons for which a version is held."""
FAILED, ABORTED = "failed", "aborted"
"""The states of `FailedEntry`."""
_COUNTS_AND_TIMES = (
    *("step", "created_ms", "nbytes", "tensor_count", "retired_ms", "ranks", "ready_ms", "verified_ms"),
    *("durable_ms", "nonfinite_elements"),
)


@dataclass(frozen=True, slots=True)
class Approval:
    """What was said for a version that was held.

    Attributes:
        reasons: for which it was held: it is not held for these any more.
        by: who said so, in their own words; may be empty.
        approved_ms: when they last did, in milliseconds since 1970 UTC.
        note: what they noted; may be empty.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a time is out of bounds, a text longer than `MAX_TEXT` or not printable, or there is no reason.
    """

    reasons: tuple[str, ...]
    by: str
    approved_ms: int
    note: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_reasons(self.reasons)
        check_number("approved_ms", self.approved_ms)
        for name in ("by", "note"):
            check_text(name, getattr(self, name))
        if not self.reasons:
            raise InvalidArgument("no reason is approved")


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A version that is part of history, or was and whose objects may still be there.

    Attributes:
        number: unique and increasing within the model, from 1.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        created_ms: when the version was opened, in milliseconds since 1970 UTC.
        nbytes: size of its safetensors files together, in bytes.
        tensor_count: number of its tensors.
        files_id: which registered side files it was written with.
        write_id: the claim of those who wrote it (`OpenEntry.claim`).
        retired_ms: when it was taken out of history, in milliseconds since 1970 UTC; 0 as long as it is part of it.
        ranks: how many trainer ranks have pushed it; 0 where that is not known, as in the times that follow.
        ready_ms: when it was complete in memory, in milliseconds since 1970 UTC.
        verified_ms: when its digests were made and a sample was compared, likewise.
        durable_ms: when it was made part of history, likewise.
        nonfinite_elements: elements of all tensors that are NaN or infinite.
        held: why ``latest`` passes it by; empty if it does not.
        approval: what was said for it when it was held for other reasons; None if nothing was.
        metadata: what was pushed with it.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a text longer than `MAX_TEXT` or not printable.
    """

    number: int
    step: int
    run: str
    created_ms: int
    nbytes: int
    tensor_count: int
    files_id: str
    write_id: str
    retired_ms: int = 0
    ranks: int = 0
    ready_ms: int = 0
    verified_ms: int = 0
    durable_ms: int = 0
    nonfinite_elements: int = 0
    held: tuple[str, ...] = ()
    approval: Approval | None = None
    metadata: Metadata = field(default_factory=dict, hash=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("number", self.number, 1, MAX_VERSION)
        for name in _COUNTS_AND_TIMES:
            check_number(name, getattr(self, name))
        for name in ("run", "files_id", "write_id"):
            check_text(name, getattr(self, name))
        if not self.write_id:
            raise InvalidArgument(f"version {self.number} has no write_id")
        check_reasons(self.held)
        checked_metadata(self.metadata)

    @property
    def retired(self) -> bool:
        """Whether it was taken out of history; its objects are there only for those who are reading them."""
        return self.retired_ms > 0

    @property
    def released(self) -> bool:
        """Whether it is part of history and not held: ``latest`` may name it."""
        return not self.retired and not self.held


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """A version that is being received, by one replica of the service or by several.

    Attributes:
        number: unique and increasing within the model, from 1.
        request_id: which request opened it; all ranks of a push send the same.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        ranks: how many trainer ranks push it.
        created_ms: when it was opened, in milliseconds since 1970 UTC.
        until_ms: when it may be taken for abandoned, unless this time is moved on before.
        files_id: which registered side files it will have.
        parent: the latest version when it was opened; 0 if there was none.
        claim: who writes its folder; empty as long as nobody does. Nobody else may write to the folder or publish.
        holder: ``host:port`` of the replica that has taken the version over, under the same claim, from the one that the claim names;
            empty if none has.
        held: why it is held, as far as that was said when it was opened; `approval` may stand against it.
        allow_nonfinite: whether it is not held for elements that are NaN or infinite.
        metadata: what is pushed with it.
        approval: what was said for it since it was complete; None if nothing was.
        by: who opened it, as the service knows them; empty if it knows nobody by name.
        cast_from: dtypes that its tensors have in the trainer and that are cast to the model's, in order.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a text longer than `MAX_TEXT` or not printable.
    """

    number: int
    request_id: str
    step: int
    run: str
    ranks: int
    created_ms: int
    until_ms: int
    files_id: str
    parent: int
    claim: str = ""
    holder: str = ""
    held: tuple[str, ...] = ()
    allow_nonfinite: bool = False
    metadata: Metadata = field(default_factory=dict, hash=False)
    approval: Approval | None = None
    by: str = ""
    cast_from: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("number", self.number, 1, MAX_VERSION)
        check_number("ranks", self.ranks, 1)
        for name in ("step", "created_ms", "until_ms", "parent"):
            check_number(name, getattr(self, name))
        for name in ("request_id", "run", "files_id", "claim", "holder", "by"):
            check_text(name, getattr(self, name))
        for dtype in self.cast_from:
            check_text("a dtype", dtype)
        check_reasons(self.held)
        checked_metadata(self.metadata)

    def holding(self, reasons: Iterable[str] = ()) -> tuple[str, ...]:
        """Why it is held now, if it is held for these reasons beside those of its opening."""
        approved = () if self.approval is None else self.approval.reasons
        return tuple(sorted({*self.held, *reasons}.difference(approved)))


@dataclass(frozen=True, slots=True)
class FailedEntry:
    """A version that was given up before anybody could see it.

    Attributes:
        number: which version.
        reason: why.
        failed_ms: when, in milliseconds since 1970 UTC.
        state: `FAILED`, or `ABORTED` if somebody asked for it; one that this release does not know counts as `FAILED`.
        step, run, ranks, created_ms: as the open version had them; 0 or empty where that is not known.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a text longer than `MAX_TEXT` or not printable.
    """

    number: int
    reason: str
    failed_ms: int
    state: str = FAILED
    step: int = 0
    run: str = ""
    ranks: int = 0
    created_ms: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("number", self.number, 1, MAX_VERSION)
        for name in ("failed_ms", "step", "ranks", "created_ms"):
            check_number(name, getattr(self, name))
        for name in ("reason", "state", "run"):
            check_text(name, getattr(self, name))

    @property
    def aborted(self) -> bool:
        """Whether it was given up because somebody asked for it."""
        return self.state == ABORTED


@dataclass(frozen=True, slots=True)
class Ref:
    """What a ref says.

    Attributes:
        version: the number of the version that it names.
        extra: the fields that this release does not know; they stay when the ref moves.
    """

    version: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("version", self.version, 1, MAX_VERSION)


Numbered = VersionEntry | OpenEntry | FailedEntry
E = TypeVar("E", VersionEntry, OpenEntry, FailedEntry, Ref, Approval)
N = TypeVar("N", VersionEntry, OpenEntry, FailedEntry)


def to_json(entry: Numbered | Ref | Approval) -> dict[str, Any]:
    """An entry as a JSON object."""
    document = dict(entry.extra)
    for item in fields(entry):
        value = getattr(entry, item.name)
        if item.name != "extra" and value != _default(item):
            document[item.name] = to_json(value) if isinstance(value, Approval) else value
    return document


def _default(item: Field[Any]) -> Any:
    """The value with which a field is left out; `MISSING` if there is none."""
    return item.default if item.default_factory is MISSING else item.default_factory()


_READERS: Mapping[Any, Callable[[strict_json.Fields, str], Any]] = {
    "str": strict_json.Fields.text,
    "int": strict_json.Fields.integer,
    "bool": strict_json.Fields.boolean,
    "tuple[str, ...]": strict_json.Fields.texts,
    "Metadata": strict_json.Fields.table,
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


def check_number(name: str, value: int, low: int = 0, high: int = strict_json.MAX_INTEGER) -> int:
    """``value``, if it is an integer from ``low`` to ``high``. Raises InvalidArgument."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, not an integer from {low} to {high}")
    return value


def check_text(name: str, value: object) -> None:
    """Raise InvalidArgument if ``value`` is not a text of up to `MAX_TEXT` printable characters."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(f"{name} is {shown(value)}, not up to {MAX_TEXT} printable characters")


def check_reasons(reasons: Iterable[str]) -> None:
    """Raise InvalidArgument if these are not up to `MAX_REASONS` different names, in order, for which a version can be held."""
    found = tuple(reasons)
    if len(found) > MAX_REASONS or list(found) != sorted({*found}):
        raise InvalidArgument(f"{shown(found)} are not up to {MAX_REASONS} different reasons in order")
    for reason in found:
        check_text("a reason", reason)
        if not reason:
            raise InvalidArgument("a reason is empty")
