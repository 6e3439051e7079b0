"""Requests that take the approval of others, and their approvals: of versions that are held, and of refs that are protected. All of it is pure.

A held version needs no request: it waits for an approval of each reason for which it is held. One approval of a reason is enough, and the
scopes of the caller say whether it may give one.

A protected ref is changed for those alone of whose scopes one names it. If that takes approvals, the change is a request, of which there
is one at a time for each ref: a newer one supersedes it. An approval names the request that it answers, so one that is repeated or late
approves nothing else. The last approval that it takes carries the request out, in the same write of the head. What counts is who may then: a scope
that was taken away since takes the request and the approvals along that were made by it.
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
"""How long a request waits for approvals."""
MAX_PROTECTED = 64
"""Most protected refs of one model."""


_KEY_DIGITS = 24
_SEPARATOR = "-"


@dataclass(frozen=True, slots=True)
class Asker:
    """Who wants to change a ref, or approves that.

    Attributes:
        name: their identity.
        proven: whether they have shown something that others have not; otherwise anybody could be somebody else.
        names_ref: whether a scope of theirs names this ref, instead of all refs.
        scope: the scope that would.
    """

    name: str
    proven: bool
    names_ref: bool
    scope: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Who may take part in changes of a ref now, whatever they might when they did.

    Attributes:
        asks: whether an identity of this name may ask for one.
        approves: whether it may approve one.
    """

    asks: Callable[[str], bool]
    approves: Callable[[str], bool]


def approve_version(history: History, number: int, approval: Approval) -> Head:
    """Hold a version no longer for reasons for which it was held. ``latest`` moves to it if it is part of history and the highest one.

    Nothing changes if it is held for none of these reasons.

    Args:
        history: before.
        number: which version; it is part of history, or open and complete.
        approval: says for which reasons, by whom and when. Others for which it is held stay.

    Raises:
        NotFound: it is neither open nor part of history.
    """
    head = history.head
    there = head.open.get(number) or check_there(history, number)
    before = () if there.approval is None else there.approval.reasons
    # the last of two approvals, for the reasons of both
    merged = replace(approval, reasons=tuple(sorted({*before, *approval.reasons})))
    if there.approval is not None:
        merged = replace(merged, extra=there.approval.extra)
    if isinstance(there, OpenEntry):
        opened = replace(there, approval=merged)
        return head if merged.reasons == before else replace(head, open={**head.open, number: opened})
    left = tuple(reason for reason in there.held if reason not in approval.reasons)
    return head if left == there.held else with_entry(head, replace(there, held=left, approval=merged))


def request_name(key: str, by: str, nonce: str) -> str:
    """The name of a new request.

    Ended requests are forgotten after a while, and whoever asks could use their names again: for something else than what somebody is about
    to approve by that name. So repetitions of a call are known by the first part of a name, and the second part is not for the caller to say.

    Args:
        key: by which the caller names all repetitions of its call.
        by: the identity that asks.
        nonce: hex digits that were never used before.
    """
    digest = hashlib.sha256(f"{by}\0{key}".encode()).hexdigest()
    return f"{digest[:_KEY_DIGITS]}{_SEPARATOR}{nonce}"


def ask(
    history: History, wanted: RequestEntry, asker: Asker, *, may_wait: bool = True
) -> tuple[Head, RequestEntry]:
    """Change a ref, or ask for it, if it takes the approval of others. Asking again for what is asked already changes nothing.

    Args:
        history: before.
        wanted: a new request of ``asker``.
        asker: who asks.
        may_wait: whether to ask if it cannot be done at once.

    Returns:
        The head after that, and the request as it stands: done or pending.

    Raises:
        PermissionDenied: the ref is protected, and no scope of ``asker`` names it.
        FailedPrecondition: it takes approvals, and ``may_wait`` is not set, or nobody knows who asks; or the request has ended before.
        AlreadyExists: another request has its name.
        NotFound, InvalidArgument, ResourceExhausted: as `set_ref` and `delete_ref`.
    """
    check_ref_name(wanted.ref)
    history = history.under(expire(history.head, wanted.asked_ms))
    head, ref = history.head, wanted.ref
    there = _repeated(head, wanted.request_id)
    if there is not None:
        if _meaning(there) != _meaning(wanted):
            raise AlreadyExists(
                f"another request is named {shown(there.request_id)}", fix="name each request anew"
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
    # also says what could never be done
    after, done = _carried_out(history.under(head), wanted, asker.name, wanted.asked_ms)
    if protection is None or not protection.approvals:
        return after, done
    _check_proven(asker)
    if not may_wait:
        raise FailedPrecondition(
            f"the ref {ref} is protected: a change takes the approval of {_others(protection.approvals)}",
            fix="ask for it: weighbridge tag MODEL@VERSION REF, or Client.request_ref",
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
    """Approve a request. With the last approval that it takes it is carried out. Approving it again adds none.

    Args:
        history: before.
        ref: which one it would change.
        request_id: of the request.
        asker: who approves.
        standing: who may ask for this and approve it now.
        now_ms: in milliseconds since 1970 UTC.
        note: why.

    Returns:
        The head after that, and the request as it stands: done or pending.

    Raises:
        PermissionDenied: ``asker`` has asked for it, or has no scope that names the ref.
        FailedPrecondition: it was withdrawn, superseded, or has expired; or nobody knows who approves; or who has asked may not any longer.
        NotFound: there is no such request for this ref, or what it names is gone.
    """
    history = history.under(expire(history.head, now_ms))
    head = history.head
    there = _named(head, ref, request_id)
    _check_named(asker, ref)
    _check_proven(asker)
    if there.by == asker.name:
        raise PermissionDenied(
            f"{asker.name} has asked for this, and cannot approve it", fix="have another identity approve it"
        )
    _check_pending(head, there, REQUEST_DONE)
    if not there.pending:
        return head, there
    if not standing.asks(there.by):
        raise FailedPrecondition(
            f"{there.by} has asked for this, and has no scope any longer that names the ref {ref}",
            fix="let somebody ask for it who has one: weighbridge tag MODEL@VERSION REF",
        )
    if all(each.by != asker.name for each in there.approvals):
        there = replace(there, approvals=(*there.approvals, Approval(asker.name, now_ms, note)))
    if missing(head, there, standing):
        return _with(head, there), there
    return _carried_out(history, there, asker.name, now_ms)


def withdraw_request(
    head: Head, ref: str, request_id: str, asker: Asker, *, now_ms: int
) -> tuple[Head, RequestEntry]:
    """End a request without carrying it out. Withdrawing it again changes nothing.

    Raises:
        PermissionDenied: no scope of ``asker`` names the ref.
        FailedPrecondition: it was carried out, superseded, or has expired.
        NotFound: there is no such request for this ref.
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
    """Protect a ref, whether it exists or not. Its protection can be raised by this, and not lowered.

    Args:
        head: before.
        wanted: says who protects it and when, and is remembered.
        approvals: of how many identities besides the one that asks a change takes the approval.
        asker: who protects it.

    Raises:
        InvalidArgument: the ref's name is malformed or reserved, or there are too many approvals.
        FailedPrecondition: it takes more approvals now, or nobody knows who asks.
        ResourceExhausted: the model has `MAX_PROTECTED` others.
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
            fix="protect it no longer first: weighbridge gate MODEL --unprotect REF",
        )
    if there is None and len(head.protected) >= MAX_PROTECTED:
        raise ResourceExhausted(
            f"the model has {len(head.protected)} protected refs", fix="protect fewer of them"
        )
    raised = replace(there or ProtectionEntry(), approvals=approvals)
    after = replace(head, protected={**head.protected, wanted.ref: raised})
    return _with(after, _closed(wanted, REQUEST_DONE, asker.name, wanted.asked_ms))


def expire(head: Head, now_ms: int) -> Head:
    """End the requests whose time is over."""
    late = [each for each in head.requests if each.pending and each.until_ms < now_ms]
    for each in late:
        head = _with(head, _closed(each, REQUEST_EXPIRED, "", each.until_ms))
    return head


def missing(head: Head, request: RequestEntry, standing: Standing) -> int:
    """How many more approvals a request takes, of those who may approve it now; 0 if it does not wait for any."""
    protection = head.protected.get(request.ref)
    if protection is None or not request.pending:
        return 0
    return max(protection.approvals - sum(standing.approves(each.by) for each in request.approvals), 0)


def _carried_out(history: History, request: RequestEntry, by: str, now_ms: int) -> tuple[Head, RequestEntry]:
    """The head after a request is carried out by a call of ``by``, and the request."""
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
        f"the request {request.request_id} asks to {shown(request.action)}, which is not known here",
        fix="use a newer Weighbridge",
    )


def _with(head: Head, request: RequestEntry) -> Head:
    """A head with a request, in place of what stood under its name, or behind all others; the oldest that have ended go for it. Those of refs
    that are not protected are not kept."""
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
    """What a request asks for, and who: two of which this is the same are one."""
    return request.ref, request.action, request.version, request.by


def _repeated(head: Head, request_id: str) -> RequestEntry | None:
    """The request that a call has made of which this would be a repetition; see `request_name`."""
    key = _key(request_id)
    return next((each for each in head.requests if _key(each.request_id) == key), None)


def _key(request_id: str) -> str:
    return request_id.partition(_SEPARATOR)[0]


def _pending(head: Head, ref: str) -> RequestEntry | None:
    return next((each for each in head.requests if each.pending and each.ref == ref), None)


def _named(head: Head, ref: str, request_id: str) -> RequestEntry:
    there = next((each for each in head.requests if (each.request_id, each.ref) == (request_id, ref)), None)
    if there is None:
        raise NotFound(
            f"there is no request {shown(request_id)} for the ref {shown(ref)}{_instead(head, ref)}"
        )
    return there


def _check_pending(head: Head, request: RequestEntry, also: str) -> None:
    """Raise FailedPrecondition if a request has ended, and not in the state ``also``."""
    if request.state in (REQUEST_PENDING, also):
        return
    by = f" by {request.closed_by}" if request.closed_by else ""
    state = "has expired" if request.state == REQUEST_EXPIRED else f"was {request.state}{by}"
    if request.state == REQUEST_DONE:
        state = f"was carried out{by}"
    raise FailedPrecondition(
        f"the request {request.request_id} for {request.ref} {state}{_instead(head, request.ref)}",
        fix="look at what is asked for now: weighbridge show MODEL",
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
            "nobody knows who asks, so nobody can be told from a second identity",
            fix="start the service with identities (weighbridge serve --policy), and show a token or a certificate",
        )


def _others(count: int) -> str:
    return "another identity" if count == 1 else f"{count} other identities"
