"""Entries of a model's head and history: versions in each of their states, refs, and the protection of refs.

An entry keeps fields of its object that this release does not know, and writes them back (`extra`).
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
"""Maximum number of reasons for which a version is held."""
MAX_APPROVALS = 16
"""Maximum number of approvals that a change of a ref can require."""
FAILED, ABORTED = "failed", "aborted"
"""States of `FailedEntry`."""
_NUMBER = (1, MAX_VERSION)


@dataclass(frozen=True, slots=True)
class Approval:
    """Approval of a version that was held, or of a request to change a protected ref.

    Attributes:
        by: identity of the approver; for a version, free text from the approver, which may be empty.
        approved_ms: time of the approval, or for a version, of the last approval, in milliseconds since 1970 UTC.
        note: the approver's note; may be empty.
        reasons: for a version, the reasons for which it is no longer held; empty for a request.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: a time is out of bounds, or a string is longer than `MAX_TEXT` or not printable.
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
    """A version that is part of history, or a retired version whose objects may still exist.

    Attributes:
        number: unique and increasing within the model, from 1.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        created_ms: when the version was opened, in milliseconds since 1970 UTC.
        nbytes: total size of its safetensors files, in bytes.
        tensor_count: number of its tensors.
        files_id: identifier of the registered side files that it was written with.
        write_id: claim of the replica that wrote it (`OpenEntry.claim`).
        retired_ms: time of its removal from history, in milliseconds since 1970 UTC; 0 while it is part of history.
        ranks: number of trainer ranks that pushed it; 0 if unknown. The following times are also 0 if unknown.
        ready_ms: time at which it was complete in memory, in milliseconds since 1970 UTC.
        verified_ms: time at which its digests were computed and a sample was compared, in milliseconds since 1970 UTC.
        durable_ms: time at which it became part of history, in milliseconds since 1970 UTC.
        nonfinite_elements: number of elements of all tensors that are NaN or infinite.
        tensor_bytes: bytes of all tensors of a training state; 0 for a version of weights, which has the registered
            tensors.
        held: reasons why ``latest`` skips it; empty if it is not held.
        approval: its last approval since it was held; None if it was not approved.
        metadata: metadata that was pushed with it.
        traceparent: W3C Trace Context of the push; empty if it was not traced.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a string is longer than `MAX_TEXT` or not printable.
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
        """Whether it was removed from history. Its objects remain only for readers that have begun."""
        return self.retired_ms > 0

    @property
    def released(self) -> bool:
        """Whether it is part of history and not held: ``latest`` may name it."""
        return not self.retired and not self.held


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """A version that is being received, by one or more replicas of the service.

    Attributes:
        number: unique and increasing within the model, from 1.
        request_id: identifier of the request that opened it; all ranks of a push send the same.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        ranks: number of trainer ranks that push it.
        created_ms: when it was opened, in milliseconds since 1970 UTC.
        until_ms: deadline after which it counts as abandoned, in milliseconds since 1970 UTC; its replica extends it.
        files_id: identifier of the registered side files that it will have.
        parent: the latest version when it was opened; 0 if none existed.
        claim: identifier of the writer that owns its folder; empty without a writer. Other writers must not write to
            the folder or publish.
        holder: ``host:port`` of the replica that has taken over the version, under the same claim, from the replica
            that the claim names; empty if none has.
        held: reasons for which it is held, as named when it was opened; `approval` may remove some of them.
        allow_nonfinite: whether it is not held for elements that are NaN or infinite.
        metadata: metadata that is pushed with it.
        approval: its approval since it was complete; None if it was not approved.
        nbytes: total size that its safetensors files will have, in bytes; 0 if not announced.
        by: identity of the caller that opened it, as the service knows it; empty if the service does not know a name.
        cast_from: dtypes that its tensors have in the trainer and that are cast to the model's, in order.
        traceparent: W3C Trace Context of the push; empty if it is not traced.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a string is longer than `MAX_TEXT` or not printable.
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
        """Reasons for which it is held now: those of its opening and ``reasons``, without approved reasons."""
        approved = () if self.approval is None else self.approval.reasons
        return tuple(sorted({*self.held, *reasons}.difference(approved)))


@dataclass(frozen=True, slots=True)
class FailedEntry:
    """A version that failed or was aborted before it was visible.

    Attributes:
        number: number of the version.
        reason: reason why it failed.
        failed_ms: time at which it failed, in milliseconds since 1970 UTC.
        state: `FAILED`, or `ABORTED` if a caller requested it. A state that this release does not know counts as
            `FAILED`. step, run,
        ranks, created_ms: as in the open version; 0 or empty if unknown.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, or a string is longer than `MAX_TEXT` or not printable.
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
        """Whether it was aborted at a caller's request."""
        return self.state == ABORTED


@dataclass(frozen=True, slots=True)
class Ref:
    """Target of a ref.

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
    """A pin of a version by an adapter: versions of the adapter are based on this one, or are about to be.

    Attributes:
        version: the number of the version that is kept.
        adapter: ``namespace/name`` of the adapter.
        by: identity that pinned it first; empty if the identity has no name.
        doubt: mark of a collection that checks whether a version of the adapter is still based on this version; empty
            if no collection checks this.
        extra: fields that this release does not know.
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
    """Conditions for changing a protected ref.

    Attributes:
        approvals: number of approvals required from identities other than the requesting one; may be 0.
        extra: fields that this release does not know.
    """

    approvals: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, approvals=(0, MAX_APPROVALS))


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """A request to change a protected ref, and its outcome.

    Attributes:
        request_id: its identifier; approvals name it.
        ref: the ref.
        action: the requested change: one of `REQUEST_MOVE` and so on, or a change that a later release adds.
        by: the requesting identity.
        asked_ms: time of the request, in milliseconds since 1970 UTC.
        until_ms: time at which it expires.
        version: the version that the ref should name; 0 if none.
        note: the requester's note; may be empty.
        approvals: the approvals given so far.
        state: pending, or its outcome: `REQUEST_DONE` and so on, or an outcome that a later release adds.
        closed_ms: time at which it ended; 0 if it has not ended.
        closed_by: identity whose call ended it; empty if it expired.
        previous: the version that the ref named before the change; 0 if none.
        extra: fields that this release does not know.

    Raises:
        InvalidArgument: a number is out of bounds, a name is malformed, or a string is longer than `MAX_TEXT` or not
            printable.
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
        """Whether it waits for approvals. It may have expired since."""
        return self.state == REQUEST_PENDING


def check_fields(entry: object, **bounds: tuple[int, ...]) -> None:
    """Raise InvalidArgument if an entry's number is not an integer within its bounds (by default at least 0), or if a
    string fails `check_text`.
    """
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
    """Returns ``value`` if it is an integer from ``low`` to ``high``. Otherwise raises InvalidArgument."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, not an integer from {low} to {high}")
    return value


def check_text(name: str, value: object) -> None:
    """Raise InvalidArgument if ``value`` is not a string of up to `MAX_TEXT` printable characters."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(f"{name} is {shown(value)}, not up to {MAX_TEXT} printable characters")


def _check_held(held: Iterable[str], approval: Approval | None) -> None:
    check_reasons(held)
    if approval is not None and not approval.reasons:
        raise InvalidArgument("no reason is approved")


def check_reasons(reasons: Iterable[str]) -> None:
    """Raise InvalidArgument unless these are at most `MAX_REASONS` different reasons for holding a version, in
    order.
    """
    found = tuple(reasons)
    if len(found) > MAX_REASONS or list(found) != sorted({*found}):
        raise InvalidArgument(f"{shown(found)} are not up to {MAX_REASONS} different reasons in order")
    for reason in found:
        check_text("a reason", reason)
        if not reason:
            raise InvalidArgument("a reason is empty")
