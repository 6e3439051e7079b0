"""What is the state of a model, what may change in it, and how do writers take turns?

A model's `head.json` is the only object that is ever rewritten. `Head` is its content; the functions on it are pure;
`HeadStore` reads it, applies one of them, and writes it back only if nobody else has meanwhile.

The text is one JSON object::

    {"format": 1, "generation": 9, "next_version": 4, "files_id": "...", "registration": {...},
     "versions": [{"number": 2, "step": 100, "run": "r1", "created_ms": 1767225600000, "nbytes": 269060381,
                   "tensor_count": 272, "files_id": "...", "write_id": "..."}, ...],
     "refs": {"latest": 3, "prod": 2}, "tombstones": {"1": 1767229200000}, "writes": ["...", ...]}
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from weighbridge.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from weighbridge.resources import REF_LATEST
from weighbridge_storage import strict_json
from weighbridge_storage.names import HEAD_FILE, MAX_VERSION, ModelName, check_ref_name, shown
from weighbridge_storage.objects import IfMatch, ObjectStore, PutMode

FORMAT = 1
REMEMBERED_WRITES = 64
"""How many write ids a head remembers: a writer whose response was lost finds its own among them."""
MAX_TEXT = 256

_KEPT_HEADS = 1024
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25

T = TypeVar("T")


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
        write_id: identity of the attempt that published it.

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
class Head:
    """The state of a model; an instance is always consistent.

    Attributes:
        generation: how often the head was written; 0 before the first time.
        next_version: the number that the next version gets, above all numbers given so far.
        files_id: which side files (config, tokenizer) are registered now; empty before the first registration.
        registration: what else was registered with the model, as JSON; this module does not look into it.
        versions: the durable versions by number.
        refs: which version each ref names. ``latest`` is the highest ever published.
        tombstones: deleted versions, and when each was deleted, in milliseconds since 1970 UTC.
        writes: ids of the last `REMEMBERED_WRITES` writes, the newest last.

    Raises:
        InvalidArgument: the parts contradict each other.
    """

    generation: int = 0
    next_version: int = 1
    files_id: str = ""
    registration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[int, VersionEntry] = field(default_factory=dict)
    refs: Mapping[str, int] = field(default_factory=dict)
    tombstones: Mapping[int, int] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_number("generation", self.generation)
        _check_number("next_version", self.next_version, 1, MAX_VERSION + 1)
        _check_text("files_id", self.files_id)
        for number, entry in self.versions.items():
            if entry.number != number:
                raise InvalidArgument(f"version {entry.number} is listed under {number}")
        for number, deleted_ms in self.tombstones.items():
            _check_number("tombstone", number, 1, MAX_VERSION)
            _check_number("time of deletion", deleted_ms)
        both = self.versions.keys() & self.tombstones.keys()
        if both:
            raise InvalidArgument(f"version {min(both)} is both there and deleted")
        highest = max((*self.versions, *self.tombstones), default=0)
        if highest >= self.next_version:
            raise InvalidArgument(f"version {highest} is there, and {self.next_version} is to be the next")
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
                "versions": [
                    {name: getattr(self.versions[number], name) for name in VersionEntry.__slots__}
                    for number in sorted(self.versions)
                ],
                "refs": dict(self.refs),
                "tombstones": {str(number): when for number, when in self.tombstones.items()},
                "writes": list(self.writes),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str = HEAD_FILE) -> Head:
        """Read the text of a `head.json`; ``where`` names it in errors.

        Raises:
            DataLoss: it is malformed, contradicts itself, or has a format that this version does not know.
        """
        fields = strict_json.decode(data, where)
        found = fields.integer("format")
        if found != FORMAT:
            raise DataLoss(
                f"{where} has format {found}, and only {FORMAT} is known here", fix="use a newer Weighbridge"
            )
        refs = strict_json.Fields(fields.table("refs"), f"{where}, refs")
        tombstones = strict_json.Fields(fields.table("tombstones"), f"{where}, tombstones")
        try:
            entries = [
                _read_entry(item, f"{where}, versions[{i}]")
                for i, item in enumerate(fields.array("versions"))
            ]
            versions = {entry.number: entry for entry in entries}
            if len(versions) != len(entries):
                raise DataLoss(f"{where} lists a version twice")
            head = Head(
                generation=fields.integer("generation", 1),
                next_version=fields.integer("next_version", 1),
                files_id=fields.text("files_id"),
                registration=fields.table("registration"),
                versions=versions,
                refs={name: refs.integer(name, 1) for name in refs.names},
                tombstones={_read_number(text, where): tombstones.integer(text) for text in tombstones.names},
                writes=tuple(fields.array("writes")),
            )
        except InvalidArgument as error:
            raise DataLoss(f"{where} is malformed: {error.message}") from error
        fields.end()
        return head


def allocate_version(head: Head) -> tuple[Head, int]:
    """Take the next number. It is given once, whatever becomes of the version.

    Raises:
        ResourceExhausted: all numbers up to `MAX_VERSION` have been given.
    """
    if head.next_version > MAX_VERSION:
        raise ResourceExhausted(f"all version numbers up to {MAX_VERSION} have been given")
    return replace(head, next_version=head.next_version + 1), head.next_version


def publish(head: Head, entry: VersionEntry) -> Head:
    """Make a version part of history. ``latest`` moves to it unless it names a higher one.

    Publishing what is already there with the same write id changes nothing.

    Raises:
        AlreadyExists: another attempt has published this number.
        FailedPrecondition: the number was never allocated, or the version was deleted.
    """
    there = head.versions.get(entry.number)
    if there is not None:
        if there.write_id == entry.write_id:
            return head
        raise AlreadyExists(f"version {entry.number} was published by another writer")
    if entry.number in head.tombstones:
        raise FailedPrecondition(f"version {entry.number} was deleted", fix="open a new version")
    if entry.number >= head.next_version:
        raise FailedPrecondition(f"version {entry.number} was never opened", fix="open a version first")
    latest = max(entry.number, head.refs.get(REF_LATEST, 0))
    return replace(
        head,
        versions={**head.versions, entry.number: entry},
        refs={**head.refs, REF_LATEST: latest},
    )


def set_ref(head: Head, name: str, number: int) -> Head:
    """Let a ref name a version, whatever it named before.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: there is no such version.
    """
    check_ref_name(name)
    _check_there(head, number)
    return replace(head, refs={**head.refs, name: number})


def delete_ref(head: Head, name: str) -> Head:
    """Remove a ref; the version it named stays.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: there is no such ref.
    """
    check_ref_name(name)
    if name not in head.refs:
        raise NotFound(f"there is no ref {name}")
    return replace(head, refs={other: number for other, number in head.refs.items() if other != name})


def delete_version(head: Head, number: int, deleted_ms: int) -> Head:
    """Take a version out of history and leave a tombstone; its objects may be deleted once this is written.

    Deleting what is already deleted changes nothing.

    Raises:
        NotFound: there is no such version.
        FailedPrecondition: a ref names it. ``latest`` always names one, so the newest version cannot be deleted.
    """
    if number in head.tombstones:
        return head
    _check_there(head, number)
    names = sorted(name for name, named in head.refs.items() if named == number)
    if names:
        raise FailedPrecondition(
            f"version {number} is what {', '.join(names[:5])} names",
            fix="publish a newer version first" if REF_LATEST in names else "move or delete the ref first",
        )
    return replace(
        head,
        versions={other: entry for other, entry in head.versions.items() if other != number},
        tombstones={**head.tombstones, number: deleted_ms},
    )


def register(head: Head, files_id: str, registration: Mapping[str, Any]) -> Head:
    """Replace what is registered with the model. Versions that are there keep the files they were written with."""
    return replace(head, files_id=files_id, registration=dict(registration))


class HeadStore:
    """The heads of all models in a store.

    Args:
        store: where they lie. It must keep its promises about conditional writes.
        patience_s: for how long an update goes on trying against other writers and a failing store, in seconds.
    """

    def __init__(self, store: ObjectStore, *, patience_s: float = 30.0) -> None:
        self._store = store
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._known: dict[ModelName, tuple[Head, str]] = {}

    def read(self, model: ModelName) -> tuple[Head, str] | None:
        """A model's head and its etag; None if there is no such model.

        Raises:
            DataLoss: the head is malformed.
            WeighbridgeError: as `ObjectStore.get`.
        """
        try:
            data, etag = self._store.get(model.head_key)
        except NotFound:
            return None
        with self._lock:
            known = self._known.get(model)
        if known is None or known[1] != etag:
            # heads grow with history, and are read far more often than they change
            known = Head.from_json(data, model.head_key), etag
            with self._lock:
                self._known.pop(model, None)
                self._known[model] = known
                while len(self._known) > _KEPT_HEADS:
                    del self._known[next(iter(self._known))]
        return known

    def update(
        self, model: ModelName, change: Callable[[Head], tuple[Head, T]], *, create: bool = False
    ) -> T:
        """Change a model's head exactly once, whoever else changes it at the same time.

        A write whose response is lost or misleading counts as done if its id stands in the head afterwards; no
        change is ever applied twice.

        Args:
            model: which model.
            change: gives the new head and a result. May be called several times, so it must have no effects of its
                own. What it raises ends the update. A head that it returns unchanged is not written.
            create: start from ``Head()`` if there is no such model.

        Returns:
            The result of the call of ``change`` that was written.

        Raises:
            NotFound: there is no such model, and ``create`` is not set.
            Conflict: other writers were faster for all of `patience_s`; nothing was changed.
            DeadlineExceeded: the store failed, and whether the change was made could not be found out.
            Unavailable: the store cannot be read; nothing was changed.
            WeighbridgeError: as `ObjectStore.put`.
        """
        give_up = time.monotonic() + self._patience_s
        results: dict[str, T] = {}
        found = self.read(model)
        attempt = 0
        doubtful = False
        while True:
            if found is None and not create:
                raise NotFound(f"there is no model {model}", fix="register it first")
            base = Head() if found is None else found[0]
            mode: PutMode = "create" if found is None else IfMatch(found[1])
            changed, result = change(base)
            if changed == base:
                return result
            write_id = uuid.uuid4().hex
            results[write_id] = result
            try:
                self._store.put(model.head_key, stamp(changed, base, write_id).to_json(), mode=mode)
                return result
            except (Conflict, Unavailable, DeadlineExceeded) as error:
                failure = error
                # A store that says Conflict has made sure of it: however often others change the head, ours is not in it.
                doubtful = doubtful or not isinstance(error, Conflict)
            # Look at once, while the head remembers this write if it landed, and again after a pause, for a head as
            # fresh as can be. A write that timed out may land between the two, so look for all of them each time.
            seen = base.generation
            for pause_s in (0.0, _pause_s(attempt)):
                time.sleep(pause_s)
                found = self._read_back(model, give_up)
                now = Head() if found is None else found[0]
                for landed in results.keys() & set(now.writes):
                    return results[landed]
                # Once the generation has moved on, no write that was made for an earlier one can land any more.
                if seen == base.generation and now.generation > seen:
                    if doubtful and now.generation > seen + REMEMBERED_WRITES:
                        raise _unknown_outcome(model, "it was changed too often meanwhile")
                    doubtful = False
                seen = now.generation
            if time.monotonic() > give_up:
                if seen == base.generation:
                    raise _unknown_outcome(model, failure.message) from failure
                raise Conflict(
                    f"other writers of {model} were faster for {self._patience_s:g} s", fix="try again"
                ) from failure
            attempt += 1

    def _read_back(self, model: ModelName, give_up: float) -> tuple[Head, str] | None:
        """As `read`, but tries until the time ``give_up`` while the store fails."""
        attempt = 0
        while True:
            try:
                return self.read(model)
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > give_up:
                    raise _unknown_outcome(model, error.message) from error
            time.sleep(_pause_s(attempt))
            attempt += 1

    def list_models(self) -> list[ModelName]:
        """All models, by name.

        Raises:
            WeighbridgeError: as `ObjectStore.folders`.
        """
        return sorted(
            model
            for namespace in self._store.folders("models/")
            for name in self._store.folders(f"models/{namespace}/")
            if (model := _model_or_none(namespace, name)) is not None and self._has_head(model)
        )

    def _has_head(self, model: ModelName) -> bool:
        try:
            self._store.size(model.head_key)
        except NotFound:
            return False
        return True


def stamp(changed: Head, base: Head, write_id: str) -> Head:
    """``changed`` as the successor of ``base``, carrying the id of the write that makes it so."""
    return replace(
        changed,
        generation=base.generation + 1,
        writes=(*base.writes[-REMEMBERED_WRITES + 1 :], write_id),
    )


def _pause_s(attempt: int) -> float:
    """A random pause, the longer the more attempts have failed, so that writers fall out of step."""
    return random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 16)))


def _unknown_outcome(model: ModelName, why: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"whether {model} was changed could not be found out: {why}",
        fix="read the model's state, then decide",
    )


def _model_or_none(namespace: str, name: str) -> ModelName | None:
    try:
        return ModelName(namespace, name)
    except InvalidArgument:
        return None


def _check_there(head: Head, number: int) -> None:
    if number not in head.versions:
        raise NotFound(f"there is no version {shown(number)}")


def _check_number(name: str, value: int, low: int = 0, high: int = strict_json.MAX_INTEGER) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, not an integer from {low} to {high}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(f"{name} is {shown(value)}, not up to {MAX_TEXT} printable characters")


def _read_entry(value: object, where: str) -> VersionEntry:
    fields = strict_json.Fields(value, where)
    entry = VersionEntry(
        number=fields.integer("number"),
        step=fields.integer("step"),
        run=fields.text("run"),
        created_ms=fields.integer("created_ms"),
        nbytes=fields.integer("nbytes"),
        tensor_count=fields.integer("tensor_count"),
        files_id=fields.text("files_id"),
        write_id=fields.text("write_id"),
    )
    fields.end()
    return entry


def _read_number(text: str, where: str) -> int:
    # Exactly what `str` writes: "07", "+7" or digits of another script would be a second name for version 7.
    if not text.isascii() or not text.isdigit() or text.startswith("0") or len(text) > 12:
        raise DataLoss(f"{where} has a tombstone for {shown(text)}, which is no version number")
    return int(text)
