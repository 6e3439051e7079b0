"""Changes of refs: at once, or as requests that others approve, where the model's gate protects the ref."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable
from functools import partial

from weighbridge._core.resources import (
    REQUEST_DELETE,
    REQUEST_DONE,
    REQUEST_MOVE,
    REQUEST_PROTECT,
    REQUEST_UNPROTECT,
    Protection,
    RefApproval,
    RefRequest,
    Version,
)
from weighbridge.errors import FailedPrecondition
from weighbridge_service.access.audit import note as note_change
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.scopes import Verb
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import RequestEntry
from weighbridge_storage.documents.names import ModelName, check_request_id
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History
from weighbridge_storage.head.ref_requests import (
    LIFETIME_MS,
    Asker,
    Standing,
    approve_request,
    ask,
    expire,
    missing,
    protect,
    request_name,
    withdraw_request,
)

log = logging.getLogger(__name__)

_Change = Callable[[History], tuple[Head, RequestEntry]]


class Refs:
    """The refs of all models. Thread-safe; any number of replicas may change them at a time.

    A change that may wait has a ``request_id``: if it takes approvals, it becomes a request of that name. Without one it is refused then.

    Args:
        catalog: which models there are.
        named: the identity that the policy has under a name now; None if there is none.
    """

    def __init__(self, catalog: Catalog, named: Callable[[str], Identity | None]) -> None:
        self._catalog = catalog
        self._named = named

    def move(
        self, name: str, ref: str, version: str, asker: Asker, *, request_id: str = "", note: str = ""
    ) -> tuple[Version, RefRequest]:
        """Let a tag name a durable version, or ask for it.

        Returns:
            The version, and the request as it stands: done or pending.

        Raises:
            InvalidArgument: the tag's name is not allowed.
            NotFound: no such version.
            FailedPrecondition: it is not durable yet; or as `ask`.
            PermissionDenied, AlreadyExists: as `ask`.
        """
        note_change(version=version)
        model = ModelName.parse(name)
        found = self._catalog.resolve(model, version)
        note_change(version=found.number)
        if not found.state.stored:
            raise FailedPrecondition(
                f"{found} is not in the object store yet", fix="wait until it is durable"
            )
        wanted = _wanted(ref, REQUEST_MOVE, asker, request_id, note, version=found.number)
        return found, self._ask(model, wanted, asker, may_wait=bool(request_id))

    def delete(
        self, name: str, ref: str, asker: Asker, *, request_id: str = "", note: str = ""
    ) -> RefRequest:
        """Take a tag away, or ask for it. Raises NotFound, and as `ask`."""
        wanted = _wanted(ref, REQUEST_DELETE, asker, request_id, note)
        return self._ask(ModelName.parse(name), wanted, asker, may_wait=bool(request_id))

    def approve(self, name: str, ref: str, request_id: str, asker: Asker, *, note: str = "") -> RefRequest:
        """Approve a request; the last approval that it takes carries it out. Raises as `approve_request`."""
        model = ModelName.parse(name)
        standing = self._standing(model, ref)
        return self._change(
            model,
            lambda history: approve_request(
                history, ref, request_id, asker, standing, now_ms=unix_ms(), note=note
            ),
            f"approved by {asker.name}",
        )

    def withdraw(self, name: str, ref: str, request_id: str, asker: Asker) -> RefRequest:
        """End a request without carrying it out. Raises as `withdraw_request`."""
        return self._change(
            ModelName.parse(name),
            lambda history: withdraw_request(history.head, ref, request_id, asker, now_ms=unix_ms()),
            f"withdrawn by {asker.name}",
        )

    def protect(self, name: str, ref: str, approvals: int, asker: Asker) -> tuple[Protection, ...]:
        """Protect a ref, or raise what its changes take. Raises NotFound, and as `ref_requests.protect`.

        Returns:
            All protections of the model.
        """
        model = ModelName.parse(name)
        wanted = _wanted(ref, REQUEST_PROTECT, asker, "", "")

        def change(history: History) -> tuple[Head, tuple[Head, Head]]:
            after = protect(history.head, wanted, approvals, asker)
            return after, (history.head, after)

        before, after = self._catalog.heads.edit(model, change)
        values = (_value(head, wanted) for head in (before, after))
        note_change(**dict(zip(("before", "after"), values, strict=True)), state=REQUEST_DONE)
        self._catalog.changes.notify(model)
        log.info("%s: %s is protected by %d approvals, says %s", model, ref, approvals, asker.name)
        return _protections(after)

    def unprotect(
        self, name: str, ref: str, asker: Asker, *, request_id: str = "", note: str = ""
    ) -> RefRequest:
        """Protect a ref no longer, or ask for it: it takes what it takes to move it. Raises NotFound, and as `ask`."""
        wanted = _wanted(ref, REQUEST_UNPROTECT, asker, request_id, note)
        return self._ask(ModelName.parse(name), wanted, asker, may_wait=bool(request_id))

    def protections(self, name: str) -> tuple[Protection, ...]:
        """What it takes to change those refs of a model that are protected. Raises NotFound."""
        return _protections(self._catalog.head(ModelName.parse(name)))

    def requests(self, name: str) -> tuple[RefRequest, ...]:
        """Requests to change protected refs: those that are pending, and the last ones that have ended, in the order of asking. Raises NotFound."""
        model = ModelName.parse(name)
        head = expire(self._catalog.head(model), unix_ms())
        return tuple(self._shown(model, head, each) for each in head.requests)

    def _ask(self, model: ModelName, wanted: RequestEntry, asker: Asker, *, may_wait: bool) -> RefRequest:
        return self._change(
            model,
            lambda history: ask(history, wanted, asker, may_wait=may_wait),
            f"asked for by {asker.name}",
        )

    def _change(self, model: ModelName, change: _Change, what: str) -> RefRequest:
        def shown(history: History) -> tuple[Head, tuple[RefRequest, dict[str, object]]]:
            after, entry = change(history)
            values = {"before": _value(history.head, entry), "after": _value(after, entry)}
            return after, (self._shown(model, after, entry), values)

        request, values = self._catalog.heads.edit(model, shown)
        note_change(
            **({"version": request.version} if request.version else {}), **values, state=request.state
        )
        log.info(
            "%s: to %s %s%s: %s, %s",
            model,
            request.action,
            request.ref,
            f" to {request.version}" if request.version else "",
            what,
            request.state,
        )
        self._catalog.changes.notify(model)
        return request

    def _standing(self, model: ModelName, ref: str) -> Standing:
        def may(verb: Verb, name: str) -> bool:
            identity = self._named(name)
            return identity is not None and identity.names(verb, str(model), ref)

        return Standing(partial(may, Verb.TAG), partial(may, Verb.APPROVE))

    def _shown(self, model: ModelName, head: Head, entry: RequestEntry) -> RefRequest:
        """A request as clients see it."""
        return RefRequest(
            model=str(model),
            ref=entry.ref,
            action=entry.action,
            state=entry.state,
            version=entry.version,
            request_id=entry.request_id,
            by=entry.by,
            note=entry.note,
            ask_time_ms=entry.asked_ms,
            expire_time_ms=entry.until_ms,
            close_time_ms=entry.closed_ms,
            closed_by=entry.closed_by,
            previous=entry.previous,
            approvals=tuple(RefApproval(each.by, each.approved_ms, each.note) for each in entry.approvals),
            missing=missing(head, entry, self._standing(model, entry.ref)),
        )


def _wanted(
    ref: str, action: str, asker: Asker, request_id: str, note: str, *, version: int = 0
) -> RequestEntry:
    now_ms = unix_ms()
    named = request_name(check_request_id(request_id or uuid.uuid4().hex), asker.name, secrets.token_hex(8))
    return RequestEntry(
        named,
        ref,
        action,
        asker.name,
        now_ms,
        now_ms + LIFETIME_MS,
        version=version,
        note=note,
    )


def _value(head: Head, wanted: RequestEntry) -> object:
    """What a request changes, as a head has it: the number that the ref names, or what its changes take; None if there is none."""
    if wanted.action in (REQUEST_PROTECT, REQUEST_UNPROTECT):
        protection = head.protected.get(wanted.ref)
        return None if protection is None else {"approvals": protection.approvals}
    return head.ref_numbers.get(wanted.ref)


def _protections(head: Head) -> tuple[Protection, ...]:
    return tuple(Protection(ref, each.approvals) for ref, each in sorted(head.protected.items()))
