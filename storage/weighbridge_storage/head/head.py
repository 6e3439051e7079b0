"""Head of a model: the content of its `head.json`, the only object that several writers rewrite.

`Head` is a value. `head_changes` and `open_versions` define its transitions, `head_store` the concurrency of writers,
and `docs/formats.md` its format. Its size does not grow with the number of versions: it contains the entries of the few
newest versions, and a reference to the root of a tree with the other entries (`history`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, cast

from weighbridge._core.resources import REF_LATEST, Gate, Retention
from weighbridge._core.text.shortening import shown
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.documents import document_digests, entry_json, strict_json
from weighbridge_storage.documents.entries import (
    FailedEntry,
    OpenEntry,
    PinEntry,
    ProtectionEntry,
    Ref,
    RequestEntry,
    VersionEntry,
    check_fields,
    check_number,
    check_text,
)
from weighbridge_storage.documents.names import HEAD_FILE, MAX_VERSION, check_files_id, check_ref_name
from weighbridge_storage.head.history_nodes import NodeRef

FORMAT = 3
HELD_VERSIONS = "held-versions"
DELETED = "deleted"
LISTED_TENSORS = "listed-tensors"
PROTECTED_REFS = "protected-refs"
KEPT_STEPS = "kept-steps"
FILE_FOLDERS = "file-folders"
ADAPTER, PINNED = "adapter", "pinned-versions"
FEATURES: frozenset[str] = frozenset(
    (
        HELD_VERSIONS,
        DELETED,
        LISTED_TENSORS,
        PROTECTED_REFS,
        KEPT_STEPS,
        FILE_FOLDERS,
        ADAPTER,
        PINNED,
    )
)
"""The features that a head may require in this release.

Each item states what a program would do that does not know the feature.

- `HELD_VERSIONS`: versions are held, or will be. It would treat a held version as the newest.
- `DELETED`: a model of this name was deleted, and its numbering continues. It would continue to receive versions of the
  deleted model, or delete the files of the current model.
- `LISTED_TENSORS`: the registration names a list of tensors. It would derive other tensors from the config.
- `PROTECTED_REFS`: refs are protected. It would move them for any caller.
- `KEPT_STEPS`: the retention counts steps. It would delete versions that this rule keeps.
- `FILE_FOLDERS`: registered files are in folders. It could not publish a version with such files.
- `ADAPTER`: the model is an adapter. It would receive versions of it without a base.
- `PINNED`: adapters pin versions. It would delete them.
"""
REMEMBERED_WRITES = 64
"""Number of write ids that a head stores. A writer whose response was lost finds its own id among them."""
REMEMBERED_FAILURES = 32
REMEMBERED_REQUESTS = 32
"""Number of ended requests to change refs that a head stores."""
_KEPT: Mapping[str, bool] = {"whole": False}
"""Metadata of a field of `Head` whose value is a separate member in the text, without fields that have their
defaults.
"""
_KEPT_WHOLE: Mapping[str, bool] = {"whole": True}
"""As `_KEPT`, but with all fields of the value. The reader rejects a head in which any of them is missing."""
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Mark:
    """An earlier root of the history. It identifies nodes that are no longer needed.

    Attributes:
        root: the root at that time; None if the history had no tree.
        generation: generation of the head at that time. A node written for that head or an earlier one is below
            ``root``, or no longer below any root.
        marked_ms: time of the mark, in milliseconds since 1970 UTC.
        extra: fields that this release does not know.
    """

    root: NodeRef | None
    generation: int
    marked_ms: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Deletion:
    """The last deletion of a model. The name may have been registered again since.

    Attributes:
        deleted_ms: time of the deletion, in milliseconds since 1970 UTC.
        below: the next version's number at that time; lower numbers belong to the deleted model.
        request_id: identifier of the request that deleted it; empty if the request had none.
        versions: number of versions in its history.
        extra: fields that this release does not know.
    """

    deleted_ms: int
    below: int
    request_id: str
    versions: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, below=(1, MAX_VERSION + 1))


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a model; an instance is always consistent.

    The entries of versions that are part of history, and of retired versions whose objects may still exist, are in
    ``recent`` or in the tree below ``root``. An entry in ``recent`` replaces the entry in the tree. `history.History`
    reads both.

    Attributes:
        generation: number of times that the head was written; 0 before the first write.
        next_version: the number that the next version gets, above all numbers assigned so far.
        files_id: identifier of the currently registered side files (config, tokenizer); empty before the first
            registration.
        registration: all other registered data of the model, as JSON. This module reads only its fields ``listed``,
            ``files`` and ``adapter``.
        recent: entries, by number, that the tree does not contain or contains in an earlier state.
        removed: numbers whose entries in the tree count as removed.
        root: the root of the tree; None if the history has no tree yet.
        mark: an earlier root, if some of its nodes may remain.
        open: the versions that are being received, by number.
        failed: the last `REMEMBERED_FAILURES` versions that failed or were aborted, by number.
        refs: target of each ref. ``latest`` names the highest version that was ever part of history and not held.
        retention: rules that determine which versions are kept.
        gate: rules that determine which versions are held.
        kept_extra: fields of these values (`KEPT`) that this release does not know, by field name.
        protected: conditions for changes of protected refs, whether or not these exist. Stored with the gate.
        requests: requests to change protected refs, in the order in which they were made: at most one pending request
            for each ref, and the last `REMEMBERED_REQUESTS` that have ended.
        writes: ids of the last `REMEMBERED_WRITES` writes, the newest last.
        deletion: the last deletion of a model of this name; None if none was deleted.
        pins: pins of versions by adapters, in the order of versions and names; these versions are kept.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: the parts contradict each other.
    """

    generation: int = 0
    next_version: int = 1
    files_id: str = ""
    registration: Mapping[str, Any] = field(default_factory=dict)
    recent: Mapping[int, VersionEntry] = field(default_factory=dict)
    removed: frozenset[int] = frozenset()
    root: NodeRef | None = None
    mark: Mark | None = None
    open: Mapping[int, OpenEntry] = field(default_factory=dict)
    failed: Mapping[int, FailedEntry] = field(default_factory=dict)
    refs: Mapping[str, Ref] = field(default_factory=dict)
    retention: Retention = field(default=Retention(), metadata=_KEPT_WHOLE)
    gate: Gate = field(default=Gate(), metadata=_KEPT)
    kept_extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    protected: Mapping[str, ProtectionEntry] = field(default_factory=dict)
    requests: tuple[RequestEntry, ...] = ()
    writes: tuple[str, ...] = ()
    deletion: Deletion | None = None
    pins: tuple[PinEntry, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("generation", self.generation)
        check_number("next_version", self.next_version, 1, MAX_VERSION + 1)
        check_files_id(self.files_id)
        self._check_numbers()
        self._check_refs()
        self._check_requests()
        for write_id in self.writes:
            check_text("write id", write_id)
        if len(self.writes) > REMEMBERED_WRITES:
            raise InvalidArgument(f"{len(self.writes)} writes are remembered, more than {REMEMBERED_WRITES}")
        self._check_deletion()
        places = [(pin.version, pin.adapter) for pin in self.pins]
        if places != sorted({*places}) or any(number >= self.next_version for number, _ in places):
            raise InvalidArgument("pins are out of order, or name a version that never existed")

    @property
    def deleted(self) -> bool:
        """Whether the model is deleted and was not registered again."""
        return self.deletion is not None and not self.files_id

    @property
    def first_version(self) -> int:
        """The lowest number that a version can have since the model was registered."""
        return 1 if self.deletion is None else self.deletion.below

    @property
    def latest(self) -> int:
        """The number that ``latest`` names; 0 if all versions published so far were held."""
        there = self.refs.get(REF_LATEST)
        return there.version if there is not None else 0

    @property
    def ref_numbers(self) -> dict[str, int]:
        """The number that each ref names."""
        return {name: ref.version for name, ref in self.refs.items()}

    def kept(self, kind: type[V]) -> V:
        """The stored value of a type, such as `Retention`."""
        return cast(V, getattr(self, KEPT[kind].name))

    def requested(self, now_ms: int) -> dict[str, int]:
        """The number that each ref is requested to name, by pending requests that have not expired."""
        return {
            each.ref: each.version
            for each in self.requests
            if each.pending and each.version and each.until_ms >= now_ms
        }

    @property
    def requires(self) -> tuple[str, ...]:
        """The features that a reader must know to read the head correctly. Counts held versions below the root, even if
        `recent` has released them since.
        """
        held = (
            self.gate.approval_required
            or (self.root is not None and self.root.held > 0)
            or any(entry.held for entry in self.recent.values())
            or any(entry.held for entry in self.open.values())
        )
        files = self.registration.get("files")
        wanted = {
            DELETED: self.deletion is not None,
            HELD_VERSIONS: held,
            LISTED_TENSORS: bool(self.registration.get("listed")),
            PROTECTED_REFS: bool(self.protected),
            FILE_FOLDERS: isinstance(files, list) and any("/" in str(name) for name in files),
            KEPT_STEPS: bool(self.retention.keep_every_steps),
            ADAPTER: bool(self.registration.get("adapter")),
            PINNED: bool(self.pins),
        }
        return tuple(feature for feature, is_wanted in wanted.items() if is_wanted)

    def in_tree(self, number: int) -> bool:
        """Whether the tree has to be read to know the state of a number."""
        return (
            self.root is not None
            and self.root.first <= number <= self.root.last
            and not any(number in known for known in (self.recent, self.removed, self.open, self.failed))
        )

    def _check_numbers(self) -> None:
        """Check that each number was assigned before, and belongs to one version in one state."""
        states: dict[int, str] = {}
        for state, listed in (
            ("there", self.recent),
            ("open", self.open),
            ("given up", self.failed),
        ):
            for number, entry in listed.items():
                if entry.number != number:
                    raise InvalidArgument(f"version {entry.number} is listed under {number}")
                if number in states:
                    raise InvalidArgument(f"version {number} is both {states[number]} and {state}")
                states[number] = state
        for number in self.removed:
            check_number("removed version", number, 1, MAX_VERSION)
            if number in states or self.root is None:
                raise InvalidArgument(f"version {number} is removed, and {states.get(number, 'there is no tree')}")
            states[number] = "removed"
        if self.root is not None:
            states.setdefault(self.root.last, "in the tree")
        for number, state in states.items():
            if number >= self.next_version:
                raise InvalidArgument(f"version {number} is {state}, but the next version is {self.next_version}")

    def _check_deletion(self) -> None:
        """Check that no version of a deleted model remains."""
        if self.deletion is None:
            return
        first = min((*self.recent, *self.removed, *self.open, *self.failed), default=self.first_version)
        if self.deletion.below > self.next_version or first < self.first_version:
            raise InvalidArgument(f"version {first} exists, but the model was deleted below {self.first_version}")
        if self.deleted and (self.next_version > self.first_version or self.root is not None):
            raise InvalidArgument("the model is deleted, but has versions")

    def _check_refs(self) -> None:
        for name, ref in self.refs.items():
            if name != REF_LATEST:
                check_ref_name(name)
            there = self.recent.get(ref.version)
            if there.retired if there is not None else not self.in_tree(ref.version):
                raise InvalidArgument(f"ref {name} names version {shown(ref.version)}, which does not exist")
        released = [number for number, entry in self.recent.items() if entry.released]
        # ``latest`` once named the versions in the tree that are not held, even if they are retired now
        published = self.root is not None and self.root.durable > self.root.held
        if self.latest < max(released, default=0) or (published and not self.latest):
            raise InvalidArgument(f"{REF_LATEST} is not the highest version that is not held")

    def _check_requests(self) -> None:
        """Check that no request is listed twice, and that at most one per ref is pending."""
        for name in self.protected:
            check_ref_name(name)
        pending = [each.ref for each in self.requests if each.pending]
        if len({*pending}) < len(pending) or not self.protected.keys() >= {*pending}:
            raise InvalidArgument("two requests for one ref are pending, or one for a ref that is not protected")
        if len({each.request_id for each in self.requests}) < len(self.requests):
            raise InvalidArgument("two requests have the same name")
        if len(self.requests) - len(pending) > REMEMBERED_REQUESTS:
            raise InvalidArgument(f"more than {REMEMBERED_REQUESTS} requests that have ended are remembered")

    def to_json(self) -> bytes:
        """The head as the text of `head.json`. The text ends with its digest.

        Raises:
            InvalidArgument: the registration contains a value that JSON cannot express.
        """
        return document_digests.encode(
            {
                **self.extra,
                "format": FORMAT,
                "requires": list(self.requires),
                "generation": self.generation,
                "next_version": self.next_version,
                "files_id": self.files_id,
                "registration": dict(self.registration),
                "recent": entry_json.list_to_json(self.recent),
                "removed": sorted(self.removed),
                "root": None if self.root is None else entry_json.to_json(self.root),
                "mark": None if self.mark is None else entry_json.to_json(self.mark),
                "open": entry_json.list_to_json(self.open),
                "failed": entry_json.list_to_json(self.failed),
                "refs": entry_json.named_to_json(self.refs),
                "writes": list(self.writes),
                **self._kept_to_json(),
                **({"requests": [entry_json.to_json(each) for each in self.requests]} if self.requests else {}),
                **({"pins": [entry_json.to_json(each) for each in self.pins]} if self.pins else {}),
                **({} if self.deletion is None else {"deletion": entry_json.to_json(self.deletion)}),
            }
        )

    def _kept_to_json(self) -> dict[str, Any]:
        """The values in `KEPT` as fields of the text. Values without any field are omitted.

        Protected refs are part of the gate's field.
        """
        found = {
            each.name: {
                **self.kept_extra.get(each.name, {}),
                **entry_json.fields_to_json(self.kept(kind), whole=each.metadata["whole"]),
            }
            for kind, each in KEPT.items()
        }
        if self.protected:
            found["gate"]["protected"] = entry_json.named_to_json(self.protected)
        return {name: value for name, value in found.items() if value}

    @staticmethod
    def from_json(data: bytes, where: str = HEAD_FILE) -> Head:
        """Read the text of a `head.json`; ``where`` names it in errors.

        Raises:
            DataLoss: it is damaged, malformed or contradictory; the message explains how to rebuild it.
            FailedPrecondition: it has another format, or requires a feature that this release does not know; the
                message names the release to use.
        """
        try:
            document = document_digests.decode(data, where, FORMAT)
            document.required(FEATURES)
            return Head._from_fields(document)
        except DataLoss as error:
            raise DataLoss(error.message, fix=document_digests.REPAIR) from error

    @staticmethod
    def _from_fields(document: strict_json.Fields) -> Head:
        where = document.where
        members = {
            each.name: strict_json.Fields(
                document.table(each.name) if each.metadata["whole"] or each.name in document else {},
                f"{where}, {each.name}",
            )
            for each in KEPT.values()
        }
        gate = members["gate"]
        with strict_json.malformed_as_data_loss(where):
            protected = gate.table("protected") if "protected" in gate else {}
            requests = document.array("requests") if "requests" in document else []
            pins = document.array("pins") if "pins" in document else []
            kept: dict[str, Any] = {
                each.name: kind(**entry_json.fields_from_json(kind, members[each.name], whole=each.metadata["whole"]))
                for kind, each in KEPT.items()
            }
            removed = [check_number("removed version", n, 1, MAX_VERSION) for n in document.array("removed")]
            return Head(
                generation=document.integer("generation", 1),
                next_version=document.integer("next_version", 1),
                files_id=document.text("files_id"),
                registration=document.table("registration"),
                recent=entry_json.list_from_json(VersionEntry, document.array("recent"), f"{where}, recent"),
                removed=frozenset(removed),
                root=entry_json.nullable(NodeRef, document, "root"),
                mark=entry_json.nullable(Mark, document, "mark"),
                open=entry_json.list_from_json(OpenEntry, document.array("open"), f"{where}, open"),
                failed=entry_json.list_from_json(FailedEntry, document.array("failed"), f"{where}, failed"),
                refs=entry_json.named_from_json(Ref, document.table("refs"), f"{where}, ref"),
                protected=entry_json.named_from_json(ProtectionEntry, protected, f"{where}, protected ref"),
                requests=tuple(
                    entry_json.from_json(RequestEntry, value, f"{where}, requests[{i}]")
                    for i, value in enumerate(requests)
                ),
                writes=tuple(document.array("writes")),
                pins=tuple(
                    entry_json.from_json(PinEntry, value, f"{where}, pins[{i}]") for i, value in enumerate(pins)
                ),
                deletion=entry_json.nullable(Deletion, document, "deletion") if "deletion" in document else None,
                kept_extra={name: rest for name, found in members.items() if (rest := found.rest())},
                extra=document.rest(),
                **kept,
            )


KEPT: Mapping[type, Field[Any]] = {type(each.default): each for each in fields(Head) if "whole" in each.metadata}
"""Fields of a head whose values are separate members in the text, by the type of the value."""
