"""What is the state of a model?

A model's `head.json` is the only object that several writers ever rewrite. `Head` is its content; `head_changes` says what may change in
it, and `head_store` how writers take turns.

The text is one JSON object::

    {"format": 2, "generation": 9, "next_version": 6, "files_id": "...", "registration": {...},
     "versions": [{"number": 2, "step": 100, "run": "r1", "created_ms": 1767225600000, "nbytes": 269060381,
                   "tensor_count": 272, "files_id": "...", "write_id": "..."}, ...],
     "open": [{"number": 5, "request_id": "...", "step": 130, "run": "r1", "ranks": 64, "created_ms": 1767225900000,
               "until_ms": 1767226500000, "files_id": "...", "parent": 3, "claim": "..."}],
     "failed": [{"number": 4, "reason": "...", "failed_ms": 1767225800000}],
     "refs": {"latest": 3, "prod": 2},
     "retention": {"keep_last": 10, "keep_every": 100, "keep_younger_s": 86400},
     "tombstones": [{"deleted_ms": 1767229200000, "version": {"number": 1, ...}}], "writes": ["...", ...]}

Format 1, which earlier versions wrote, has neither open and failed versions nor a retention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.resources import REF_LATEST, Retention
from weighbridge_storage import strict_json
from weighbridge_storage.names import HEAD_FILE, MAX_VERSION, check_ref_name, shown

FORMAT = 2
REMEMBERED_WRITES = 64
"""How many write ids a head remembers: a writer whose response was lost finds its own among them."""
REMEMBERED_FAILURES = 32
MAX_TEXT = 256
_KEEP_EVERYTHING = Retention()

E = TypeVar("E", "VersionEntry", "OpenEntry", "FailedEntry")


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A durable version, as the head lists it.

    Attributes:
        number: unique and increasing within the model, from 1.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        created_ms: when the version was opened, in milliseconds since 1970 UTC.
        nbytes: size of its safetensors files together, in bytes.
        tensor_count: number of its tensors.
        files_id: which registered side files it was written with.
        write_id: the claim of those who wrote it (`OpenEntry.claim`).

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

    def __post_init__(self) -> None:
        _check_number("number", self.number, 1, MAX_VERSION)
        for name in ("step", "created_ms", "nbytes", "tensor_count"):
            _check_number(name, getattr(self, name))
        for name in ("run", "files_id", "write_id"):
            _check_text(name, getattr(self, name))
        if not self.write_id:
            raise InvalidArgument(f"version {self.number} has no write_id")


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

    def __post_init__(self) -> None:
        _check_number("number", self.number, 1, MAX_VERSION)
        _check_number("ranks", self.ranks, 1)
        for name in ("step", "created_ms", "until_ms", "parent"):
            _check_number(name, getattr(self, name))
        for name in ("request_id", "run", "files_id", "claim"):
            _check_text(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class FailedEntry:
    """A version that was given up before anybody could see it: which one, why, and when, in milliseconds since 1970 UTC."""

    number: int
    reason: str
    failed_ms: int

    def __post_init__(self) -> None:
        _check_number("number", self.number, 1, MAX_VERSION)
        _check_number("failed_ms", self.failed_ms)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A version that was taken out of history: what it was, and when that happened, in milliseconds since 1970 UTC.

    Its objects are still there, for those who are reading them.
    """

    version: VersionEntry
    deleted_ms: int

    def __post_init__(self) -> None:
        _check_number("time of deletion", self.deleted_ms)


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a model; an instance is always consistent.

    Attributes:
        generation: how often the head was written; 0 before the first time.
        next_version: the number that the next version gets, above all numbers given so far.
        files_id: which side files (config, tokenizer) are registered now; empty before the first registration.
        registration: what else was registered with the model, as JSON; this module does not look into it.
        versions: the durable versions by number.
        open: the versions that are being received, by number.
        failed: the last `REMEMBERED_FAILURES` versions that were given up, by number.
        refs: which version each ref names. ``latest`` is the highest ever published.
        retention: which versions are to be kept.
        tombstones: versions that were taken out of history and whose objects are not deleted yet, by number.
        writes: ids of the last `REMEMBERED_WRITES` writes, the newest last.

    Raises:
        InvalidArgument: the parts contradict each other.
    """

    generation: int = 0
    next_version: int = 1
    files_id: str = ""
    registration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[int, VersionEntry] = field(default_factory=dict)
    open: Mapping[int, OpenEntry] = field(default_factory=dict)
    failed: Mapping[int, FailedEntry] = field(default_factory=dict)
    refs: Mapping[str, int] = field(default_factory=dict)
    retention: Retention = _KEEP_EVERYTHING
    tombstones: Mapping[int, Tombstone] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_number("generation", self.generation)
        _check_number("next_version", self.next_version, 1, MAX_VERSION + 1)
        _check_text("files_id", self.files_id)
        self._check_numbers()
        for name, number in self.refs.items():
            if name != REF_LATEST:
                check_ref_name(name)
            if number not in self.versions:
                raise InvalidArgument(f"ref {name} names version {shown(number)}, which is not there")
        if self.refs.get(REF_LATEST) != max(self.versions, default=None):
            raise InvalidArgument(f"{REF_LATEST} is not the highest version")
        for write_id in self.writes:
            _check_text("write id", write_id)
        if len(self.writes) > REMEMBERED_WRITES:
            raise InvalidArgument(f"{len(self.writes)} writes are remembered, more than {REMEMBERED_WRITES}")

    def readable(self, number: int) -> VersionEntry | None:
        """What is said of a version that is durable, or was and whose objects may still be there; None if it is neither."""
        tombstone = self.tombstones.get(number)
        return tombstone.version if tombstone else self.versions.get(number)

    def is_gone(self, number: int) -> bool:
        """Whether a number was given and stands for nothing any more: its version was given up, or deleted and forgotten.

        That is for good, so whatever lies under such a number is nobody's.
        """
        return number < self.next_version and not (
            number in self.versions or number in self.open or number in self.tombstones
        )

    def _check_numbers(self) -> None:
        """Each number stands for one version, in one state, and was given before."""
        states: dict[int, str] = {}
        for state, entries in (
            ("there", self.versions),
            ("open", self.open),
            ("given up", self.failed),
            ("deleted", {number: tombstone.version for number, tombstone in self.tombstones.items()}),
        ):
            for number, entry in entries.items():
                if entry.number != number:
                    raise InvalidArgument(f"version {entry.number} is listed under {number}")
                if number in states:
                    raise InvalidArgument(f"version {number} is both {states[number]} and {state}")
                if number >= self.next_version:
                    raise InvalidArgument(
                        f"version {number} is {state}, and {self.next_version} is to be the next"
                    )
                states[number] = state

    def to_json(self) -> bytes:
        """The head as the text of `head.json`.

        Raises:
            InvalidArgument: the registration holds something that JSON does not have.
        """
        return strict_json.encode(
            {
                "format": FORMAT,
                "generation": self.generation,
                "next_version": self.next_version,
                "files_id": self.files_id,
                "registration": dict(self.registration),
                "versions": _written(self.versions),
                "open": _written(self.open),
                "failed": _written(self.failed),
                "refs": dict(self.refs),
                "retention": self.retention.to_json(),
                "tombstones": [
                    {"deleted_ms": tombstone.deleted_ms, "version": _written_entry(tombstone.version)}
                    for _, tombstone in sorted(self.tombstones.items())
                ],
                "writes": list(self.writes),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str = HEAD_FILE) -> Head:
        """Read the text of a `head.json`; ``where`` names it in errors.

        Raises:
            DataLoss: it is malformed, contradicts itself, or has a format that this version does not know.
        """
        document = strict_json.decode(data, where)
        found = document.integer("format")
        if found not in (1, FORMAT):
            raise DataLoss(
                f"{where} has format {found}, and only formats up to {FORMAT} are known here",
                fix="use a newer Weighbridge",
            )
        refs = strict_json.Fields(document.table("refs"), f"{where}, refs")
        try:
            head = Head(
                generation=document.integer("generation", 1),
                next_version=document.integer("next_version", 1),
                files_id=document.text("files_id"),
                registration=document.table("registration"),
                versions=_read(VersionEntry, document, "versions"),
                refs={name: refs.integer(name, 1) for name in refs.names},
                writes=tuple(document.array("writes")),
                **(_of_format_1(document) if found == 1 else _since_format_2(document)),
            )
        except InvalidArgument as error:
            raise DataLoss(f"{where} is malformed: {error.message}") from error
        document.end()
        return head


def _since_format_2(document: strict_json.Fields) -> dict[str, Any]:
    where = document.where
    tombstones: dict[int, Tombstone] = {}
    for i, item in enumerate(document.array("tombstones")):
        found = strict_json.Fields(item, f"{where}, tombstones[{i}]")
        version = _read_entry(VersionEntry, found.table("version"), f"{found.where}, version")
        if version.number in tombstones:
            raise DataLoss(f"{where} lists a tombstone twice")
        tombstones[version.number] = Tombstone(version, found.integer("deleted_ms"))
        found.end()
    retention = strict_json.Fields(document.table("retention"), f"{where}, retention")
    kept = Retention(**{name: retention.integer(name) for name in _KEEP_EVERYTHING.to_json()})
    retention.end()
    return {
        "open": _read(OpenEntry, document, "open"),
        "failed": _read(FailedEntry, document, "failed"),
        "retention": kept,
        "tombstones": tombstones,
    }


def _of_format_1(document: strict_json.Fields) -> dict[str, Any]:
    # what it says of deleted versions is not needed: their numbers are never given again, and their objects are swept away
    document.table("tombstones")
    return {}


def _written(entries: Mapping[int, VersionEntry | OpenEntry | FailedEntry]) -> list[dict[str, Any]]:
    return [_written_entry(entries[number]) for number in sorted(entries)]


def _written_entry(entry: VersionEntry | OpenEntry | FailedEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def _read(kind: type[E], document: strict_json.Fields, name: str) -> dict[int, E]:
    entries = [
        _read_entry(kind, item, f"{document.where}, {name}[{i}]")
        for i, item in enumerate(document.array(name))
    ]
    found = {entry.number: entry for entry in entries}
    if len(found) != len(entries):
        raise DataLoss(f"{document.where} lists a version twice in {name}")
    return found


def _read_entry(kind: type[E], value: object, where: str) -> E:
    found = strict_json.Fields(value, where)
    values: dict[str, Any] = {
        item.name: found.text(item.name) if item.type == "str" else found.integer(item.name)
        for item in fields(kind)
    }
    found.end()
    return kind(**values)


def _check_number(name: str, value: int, low: int = 0, high: int = strict_json.MAX_INTEGER) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, not an integer from {low} to {high}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(f"{name} is {shown(value)}, not up to {MAX_TEXT} printable characters")
