"""Entries of a model's head and history: versions in each of their states, refs, and what is asked of those that are protected.

An entry keeps the fields of its object that this release does not know, and writes them back (`extra`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from weighbridge._core.metadata import Metadata, checked_metadata
from weighbridge._core.resources import REQUEST_PENDING
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import MAX_VERSION, ModelName, check_ref_name, check_request_id

MAX_TEXT = 256
MAX_REASONS = 16
"""Most reasons for which a version is held."""
MAX_APPROVALS = 16
"""Most approvals that a change of a ref can take."""
FAILED, ABORTED = "failed", "aborted"
"""The states of `FailedEntry`."""
_NUMBER = (1, MAX_VERSION)


@dataclass(frozen=True, slots=True)
class Approval:
    """The approval of a version that was held, or of a request to change a protected ref.

    Attributes:
        by: the identity that approves; of a version, in their own words, and may be empty.
        approved_ms: when, in milliseconds since 1970 UTC; of a version, when it was approved last.
        note: what they noted; may be empty.
        reasons: of a version, those for which it is not held any more; empty for a request.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a time is out of bounds, or a text longer than `MAX_TEXT` or not printable.
    """

    by: str
    approved_ms: int
    note: str = ""
    reasons: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_reasons(self.reasons)


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
        tensor_bytes: bytes of all tensors, of a training state; 0 of a version of weights, which has those that are registered.
        held: why ``latest`` passes it by; empty if it does not.
        approval: what was said for it when it was held for other reasons; None if nothing was.
        metadata: what was pushed with it.
        traceparent: of the push, by W3C Trace Context; empty if it was not traced.
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
    tensor_bytes: int = 0
    held: tuple[str, ...] = ()
    approval: Approval | None = None
    metadata: Metadata = field(default_factory=dict, hash=False)
    traceparent: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, number=_NUMBER)
        if not self.write_id:
            raise InvalidArgument(f"version {self.number} has no write_id")
        _check_held(self.held, self.approval)
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
        nbytes: size that its safetensors files will have together, in bytes; 0 if that was not said.
        by: who opened it, as the service knows them; empty if it knows nobody by name.
        cast_from: dtypes that its tensors have in the trainer and that are cast to the model's, in order.
        traceparent: of the push, by W3C Trace Context; empty if it is not traced.
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
    nbytes: int = 0
    by: str = ""
    cast_from: tuple[str, ...] = ()
    traceparent: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, number=_NUMBER, ranks=(1,))
        for dtype in self.cast_from:
            check_text("a dtype", dtype)
        _check_held(self.held, self.approval)
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
        check_fields(self, number=_NUMBER)

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
        check_fields(self, version=_NUMBER)


@dataclass(frozen=True, slots=True)
class PinEntry:
    """A pin of a version by an adapter: versions of the adapter are, or are about to be, on this one.

    Attributes:
        version: the number of the version that is kept.
        adapter: ``namespace/name`` of the adapter.
        by: the identity that has pinned it first; empty if it has no name.
        doubt: the mark of a collection that looks whether a version of the adapter is still on this one; empty if none does.
        extra: the fields that this release does not know.
    """

    version: int
    adapter: str
    by: str = ""
    doubt: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, version=_NUMBER)
        ModelName.parse(self.adapter)


@dataclass(frozen=True, slots=True)
class ProtectionEntry:
    """What it takes to change a ref that is protected.

    Attributes:
        approvals: of how many identities besides the one that asks; 0 if it takes none.
        extra: the fields that this release does not know.
    """

    approvals: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, approvals=(0, MAX_APPROVALS))


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """A request to change a ref that is protected, and what has become of it.

    Attributes:
        request_id: which one; approvals name it.
        ref: the ref.
        action: what is asked, one of `REQUEST_MOVE` and so on, or what a later release adds.
        by: the identity that asks.
        asked_ms: when it did, in milliseconds since 1970 UTC.
        until_ms: when it expires.
        version: the version that the ref shall name; 0 if none.
        note: what they noted; may be empty.
        approvals: those given so far.
        state: pending, or how it ended: `REQUEST_DONE` and so on, or what a later release adds.
        closed_ms: when it ended; 0 if it has not.
        closed_by: whose call ended it; empty if that was time.
        previous: what the ref named before it was carried out; 0 if nothing.
        extra: the fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, a name malformed, or a text longer than `MAX_TEXT` or not printable.
    """

    request_id: str
    ref: str
    action: str
    by: str
    asked_ms: int
    until_ms: int
    version: int = 0
    note: str = ""
    approvals: tuple[Approval, ...] = ()
    state: str = REQUEST_PENDING
    closed_ms: int = 0
    closed_by: str = ""
    previous: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_request_id(self.request_id)
        check_ref_name(self.ref)
        check_fields(self, version=(0, MAX_VERSION), previous=(0, MAX_VERSION))
        if len(self.approvals) > MAX_APPROVALS:
            raise InvalidArgument(f"the request {self.request_id} has more than {MAX_APPROVALS} approvals")

    @property
    def pending(self) -> bool:
        """Whether it waits for approvals, unless it has expired since."""
        return self.state == REQUEST_PENDING


def check_fields(entry: object, **bounds: tuple[int, ...]) -> None:
    """Raise InvalidArgument if a number of an entry is not an integer within its bounds, by default from 0 on, or a text not as `check_text` says."""
    of: Any = type(entry)
    for name, kind in _checked(of):
        value = getattr(entry, name)
        if kind == "int":
            check_number(name, value, *bounds.get(name, ()))
        else:
            check_text(name, value)


@cache
def _checked(kind: Any) -> tuple[tuple[str, str], ...]:
    return tuple((item.name, str(item.type)) for item in fields(kind) if item.type in ("int", "str"))


def check_number(name: str, value: int, low: int = 0, high: int = strict_json.MAX_INTEGER) -> int:
    """``value``, if it is an integer from ``low`` to ``high``. Raises InvalidArgument."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, not an integer from {low} to {high}")
    return value


def check_text(name: str, value: object) -> None:
    """Raise InvalidArgument if ``value`` is not a text of up to `MAX_TEXT` printable characters."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(f"{name} is {shown(value)}, not up to {MAX_TEXT} printable characters")


def _check_held(held: Iterable[str], approval: Approval | None) -> None:
    check_reasons(held)
    if approval is not None and not approval.reasons:
        raise InvalidArgument("no reason is approved")


def check_reasons(reasons: Iterable[str]) -> None:
    """Raise InvalidArgument if these are not up to `MAX_REASONS` different names, in order, for which a version can be held."""
    found = tuple(reasons)
    if len(found) > MAX_REASONS or list(found) != sorted({*found}):
        raise InvalidArgument(f"{shown(found)} are not up to {MAX_REASONS} different reasons in order")
    for reason in found:
        check_text("a reason", reason)
        if not reason:
            raise InvalidArgument("a reason is empty")
