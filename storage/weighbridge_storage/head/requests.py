"""Requests that need approval by other identities, and their approvals, for held versions and protected refs.

All functions are pure.

A held version does not need a request: it waits for an approval of each reason for which it is held. One approval per
reason is enough. The caller's scopes determine whether the caller may approve it.

Only a caller with a scope that names a protected ref may change it. If the change needs approvals, it becomes a
request. A ref has at most one pending request: a newer request supersedes it. An approval names its request, so a
repeated or late approval does not approve anything else. The last approval that a request needs carries out the
request, in the same write of the head. The scopes at that time apply: once an identity has lost its scope, its requests
cannot be approved and its approvals do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from weighbridge._core.resources import (
    REQUEST_DELETE,
    REQUEST_DONE,
    REQUEST_EXPIRED,
    REQUEST_MOVE,
    REQUEST_PENDING,
    REQUEST_SUPERSEDED,
    REQUEST_UNPROTECT,
    REQUEST_WITHDRAWN,
)
from weighbridge._core.text.shortening import shown
from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from weighbridge_storage.documents.entries import (
    MAX_APPROVALS,
    Approval,
    OpenEntry,
    ProtectionEntry,
    RequestEntry,
)
from weighbridge_storage.documents.names import check_ref_name
from weighbridge_storage.head.head import REMEMBERED_REQUESTS, Head
from weighbridge_storage.head.head_changes import check_there, delete_ref, set_ref, with_entry
from weighbridge_storage.head.history import History

LIFETIME_MS = 7 * 86_400_000
"""Time for which a request waits for approvals, in milliseconds."""
MAX_PROTECTED = 64
"""Maximum number of protected refs of one model."""


_KEY_DIGITS = 24
_SEPARATOR = "-"


@dataclass(frozen=True, slots=True)
class Asker:
    """A caller that changes a ref, or approves a change.

    Attributes:
        name: its identity.
        proven: whether it has authenticated; otherwise one caller could pose as two.
        names_ref: whether one of its scopes names this ref instead of all refs.
        scope: the scope that names the ref.
    """

    name: str
    proven: bool
    names_ref: bool
    scope: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Current rights of identities to change a ref, regardless of their earlier rights.

    Attributes:
        asks: whether the identity of this name may request a change.
        approves: whether it may approve a change.
    """

    asks: Callable[[str], bool]
    approves: Callable[[str], bool]


def approve_version(history: History, number: int, approval: Approval) -> Head:
    """Remove reasons for which a version is held. ``latest`` moves to the version if it is then not held, is part of
    history, and is the highest such version.

    Nothing changes if the version is not held for any of these reasons.

    Args:
        history: the history before.
        number: number of the version; it is part of history, or open and complete.
        approval: the reasons, the approver and the time. Other reasons stay.

    Raises:
        NotFound: it is neither open nor part of history.
    """
    head = history.head
    there = head.open.get(number) or check_there(history, number)
    before = () if there.approval is None else there.approval.reasons
    # keep the later of two approvals, with the reasons of both
    merged = replace(approval, reasons=tuple(sorted({*before, *approval.reasons})))
    if there.approval is not None:
        merged = replace(merged, extra=there.approval.extra)
    if isinstance(there, OpenEntry):
        opened = replace(there, approval=merged)
        return head if merged.reasons == before else replace(head, open={**head.open, number: opened})
    left = tuple(reason for reason in there.held if reason not in approval.reasons)
    return head if left == there.held else with_entry(head, replace(there, held=left, approval=merged))


def request_name(key: str, by: str, nonce: str) -> str:
    """Identifier of a new request.

    The record of an ended request is removed after a while. A caller could then reuse its identifier for another change
    than the one that an approver is about to approve. So the first part of an identifier identifies repetitions of a
    call, and the caller cannot choose the second part.

    Args:
        key: the caller's key for all repetitions of its call.
        by: the requesting identity.
        nonce: hex digits that were never used before.
    """
    digest = hashlib.sha256(f"{by}\0{key}".encode()).hexdigest()
    return f"{digest[:_KEY_DIGITS]}{_SEPARATOR}{nonce}"


def ask(history: History, wanted: RequestEntry, asker: Asker, *, may_wait: bool = True) -> tuple[Head, RequestEntry]:
    """Change a ref, or request the change if it needs approval. Repeating a request changes nothing.

    Args:
        history: the history before.
        wanted: a new request of ``asker``.
        asker: the caller.
        may_wait: whether to request the change if it cannot be made at once.

    Returns:
        The resulting head, and the request: done or pending.

    Raises:
        PermissionDenied: the ref is protected, and no scope of ``asker`` names it.
        FailedPrecondition: it needs approvals, and ``may_wait`` is false, or the caller has not authenticated; or the
            request has ended.
        AlreadyExists: another request has its identifier.
        NotFound, InvalidArgument, ResourceExhausted: as `set_ref` and `delete_ref`.
    """
    check_ref_name(wanted.ref)
    history = history.under(expire(history.head, wanted.asked_ms))
    head, ref = history.head, wanted.ref
    there = _repeated(head, wanted.request_id)
    if there is not None:
        if _meaning(there) != _meaning(wanted):
            raise AlreadyExists(
                f"another request is named {shown(there.request_id)}", fix="give each request its own ID"
            )
        _check_pending(head, there, REQUEST_DONE)
        return head, there
    protection = head.protected.get(ref)
    if protection is not None:
        _check_named(asker, ref)
        pending = _pending(head, ref)
        if pending is not None and may_wait and _meaning(pending) == _meaning(wanted):
            return head, pending
        if pending is not None:
            head = _with(head, _closed(pending, REQUEST_SUPERSEDED, asker.name, wanted.asked_ms))
    # before the request waits for approvals: raises if the change is impossible
    after, done = _carried_out(history.under(head), wanted, asker.name, wanted.asked_ms)
    if protection is None or not protection.approvals:
        return after, done
    _check_proven(asker)
    if not may_wait:
        raise FailedPrecondition(
            f"the ref {ref} is protected: a change needs the approval of {_others(protection.approvals)}",
            fix="request it: weighbridge tag MODEL@VERSION REF, or Client.request_ref",
        )
    return _with(head, wanted), wanted


def approve_request(
    history: History,
    ref: str,
    request_id: str,
    asker: Asker,
    standing: Standing,
    *,
    now_ms: int,
    note: str = "",
) -> tuple[Head, RequestEntry]:
    """Approve a request. The last approval that it needs carries out the request.

    A repeated approval by one identity does not count again.

    Args:
        history: the history before.
        ref: the ref that it would change.
        request_id: identifier of the request.
        asker: the approver.
        standing: current rights to request and approve the change.
        now_ms: current time in milliseconds since 1970 UTC.
        note: the approver's note.

    Returns:
        The resulting head, and the request: done or pending.

    Raises:
        PermissionDenied: ``asker`` has made the request, or has no scope that names the ref.
        FailedPrecondition: the request was withdrawn or superseded, or has expired; the approver has not authenticated;
            or the requester has lost its scope.
        NotFound: the request does not exist for this ref, or the version that it names no longer exists.
    """
    history = history.under(expire(history.head, now_ms))
    head = history.head
    there = _named(head, ref, request_id)
    _check_named(asker, ref)
    _check_proven(asker)
    if there.by == asker.name:
        raise PermissionDenied(
            f"{asker.name} made this request and cannot approve it", fix="have another identity approve it"
        )
    _check_pending(head, there, REQUEST_DONE)
    if not there.pending:
        return head, there
    if not standing.asks(there.by):
        raise FailedPrecondition(
            f"{there.by} made this request, and no longer has a scope that names the ref {ref}",
            fix="have an identity with such a scope request it: weighbridge tag MODEL@VERSION REF",
        )
    if all(each.by != asker.name for each in there.approvals):
        there = replace(there, approvals=(*there.approvals, Approval(asker.name, now_ms, note)))
    if missing(head, there, standing):
        return _with(head, there), there
    return _carried_out(history, there, asker.name, now_ms)


def withdraw_request(head: Head, ref: str, request_id: str, asker: Asker, *, now_ms: int) -> tuple[Head, RequestEntry]:
    """End a request without carrying it out. A repeated call changes nothing.

    Raises:
        PermissionDenied: no scope of ``asker`` names the ref.
        FailedPrecondition: the request was carried out or superseded, or has expired.
        NotFound: the request does not exist for this ref.
    """
    head = expire(head, now_ms)
    there = _named(head, ref, request_id)
    _check_named(asker, ref)
    _check_pending(head, there, REQUEST_WITHDRAWN)
    if not there.pending:
        return head, there
    withdrawn = _closed(there, REQUEST_WITHDRAWN, asker.name, now_ms)
    return _with(head, withdrawn), withdrawn


def protect(head: Head, wanted: RequestEntry, approvals: int, asker: Asker) -> Head:
    """Protect a ref, whether or not it exists. This can raise the protection, but not lower it.

    Args:
        head: the head before.
        wanted: record of the caller and the time; it is stored.
        approvals: number of other identities whose approval a change needs.
        asker: the caller.

    Raises:
        InvalidArgument: the ref's name is malformed or reserved, or there are too many approvals.
        FailedPrecondition: the ref already requires more approvals, or the caller has not authenticated.
        ResourceExhausted: the model already has `MAX_PROTECTED` other protected refs.
    """
    check_ref_name(wanted.ref)
    if not 0 <= approvals <= MAX_APPROVALS:
        raise InvalidArgument(f"{approvals} approvals are not between 0 and {MAX_APPROVALS}")
    _check_proven(asker)
    head = expire(head, wanted.asked_ms)
    there = head.protected.get(wanted.ref)
    if there is not None and there.approvals == approvals:
        return head
    if there is not None and there.approvals > approvals:
        raise FailedPrecondition(
            f"the ref {wanted.ref} is protected by {there.approvals} approvals, which cannot be lowered to {approvals}",
            fix="remove its protection first: weighbridge gate MODEL --unprotect REF",
        )
    if there is None and len(head.protected) >= MAX_PROTECTED:
        raise ResourceExhausted(f"the model has {len(head.protected)} protected refs", fix="protect fewer of them")
    raised = replace(there or ProtectionEntry(), approvals=approvals)
    after = replace(head, protected={**head.protected, wanted.ref: raised})
    return _with(after, _closed(wanted, REQUEST_DONE, asker.name, wanted.asked_ms))


def expire(head: Head, now_ms: int) -> Head:
    """End the requests that have expired."""
    late = [each for each in head.requests if each.pending and each.until_ms < now_ms]
    for each in late:
        head = _with(head, _closed(each, REQUEST_EXPIRED, "", each.until_ms))
    return head


def missing(head: Head, request: RequestEntry, standing: Standing) -> int:
    """Number of approvals that a pending request still needs; approvals by identities that may no longer approve do not
    count.
    """
    protection = head.protected.get(request.ref)
    if protection is None or not request.pending:
        return 0
    return max(protection.approvals - sum(standing.approves(each.by) for each in request.approvals), 0)


def _carried_out(history: History, request: RequestEntry, by: str, now_ms: int) -> tuple[Head, RequestEntry]:
    """The head after a call by ``by`` carries out a request, and the request."""
    previous = history.head.ref_numbers.get(request.ref, 0)
    done = replace(_closed(request, REQUEST_DONE, by, now_ms), previous=previous)
    return _effect(history.under(_with(history.head, done)), done), done


def _effect(history: History, request: RequestEntry) -> Head:
    head = history.head
    if request.action == REQUEST_MOVE:
        return set_ref(history, request.ref, request.version)
    if request.action == REQUEST_DELETE:
        return delete_ref(head, request.ref)
    if request.action == REQUEST_UNPROTECT:
        if request.ref not in head.protected:
            raise NotFound(f"the ref {request.ref} is not protected")
        left = {name: each for name, each in head.protected.items() if name != request.ref}
        return replace(head, protected=left)
    raise FailedPrecondition(
        f"the request {request.request_id} asks to {shown(request.action)}, which this Weighbridge does not know",
        fix="use a newer Weighbridge",
    )


def _with(head: Head, request: RequestEntry) -> Head:
    """A head with a request. It replaces the request with the same identifier, or is added last. The oldest ended
    requests are removed. Requests for unprotected refs are not stored.
    """
    if request.ref not in head.protected:
        return head
    there = [request if each.request_id == request.request_id else each for each in head.requests]
    if request not in there:
        there.append(request)
    ended = [each.request_id for each in there if not each.pending]
    forgotten = {*ended[:-REMEMBERED_REQUESTS]}
    return replace(head, requests=tuple(each for each in there if each.request_id not in forgotten))


def _closed(request: RequestEntry, state: str, by: str, now_ms: int) -> RequestEntry:
    return replace(request, state=state, closed_by=by, closed_ms=now_ms)


def _meaning(request: RequestEntry) -> tuple[str, str, int, str]:
    """Content of a request and its requester. Requests with the same result count as one request."""
    return request.ref, request.action, request.version, request.by


def _repeated(head: Head, request_id: str) -> RequestEntry | None:
    """The request of an earlier attempt of the same call; see `request_name`."""
    key = _key(request_id)
    return next((each for each in head.requests if _key(each.request_id) == key), None)


def _key(request_id: str) -> str:
    return request_id.partition(_SEPARATOR)[0]


def _pending(head: Head, ref: str) -> RequestEntry | None:
    return next((each for each in head.requests if each.pending and each.ref == ref), None)


def _named(head: Head, ref: str, request_id: str) -> RequestEntry:
    there = next((each for each in head.requests if (each.request_id, each.ref) == (request_id, ref)), None)
    if there is None:
        raise NotFound(f"there is no request {shown(request_id)} for the ref {shown(ref)}{_instead(head, ref)}")
    return there


def _check_pending(head: Head, request: RequestEntry, also: str) -> None:
    """Raise FailedPrecondition if a request has ended in a state other than ``also``."""
    if request.state in (REQUEST_PENDING, also):
        return
    by = f" by {request.closed_by}" if request.closed_by else ""
    state = "has expired" if request.state == REQUEST_EXPIRED else f"was {request.state}{by}"
    if request.state == REQUEST_DONE:
        state = f"was carried out{by}"
    raise FailedPrecondition(
        f"the request {request.request_id} for {request.ref} {state}{_instead(head, request.ref)}",
        fix="list the pending requests: weighbridge show MODEL",
    )


def _instead(head: Head, ref: str) -> str:
    pending = _pending(head, ref)
    return "" if pending is None else f"; {pending.request_id} of {pending.by} is pending"


def _check_named(asker: Asker, ref: str) -> None:
    if not asker.names_ref:
        raise PermissionDenied(
            f"the ref {ref} is protected, and no scope of {asker.name} names it",
            fix=f"let the service's policy give {asker.name} the scope {asker.scope}; * and admin do not name a ref",
        )


def _check_proven(asker: Asker) -> None:
    if not asker.proven:
        raise FailedPrecondition(
            "the caller is not identified, so it cannot be distinguished from a second identity",
            fix="start the service with identities (weighbridge serve --policy), and present a token or a certificate",
        )


def _others(count: int) -> str:
    return "another identity" if count == 1 else f"{count} other identities"
