"""Gates of models: held versions, protected refs, and the approvals of both."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import (
    REQUEST_DONE,
    REQUEST_MOVE,
    REQUEST_PROTECT,
    REQUEST_UNPROTECT,
    ModelRefs,
    Protection,
    RefApproval,
    RefRequest,
    Version,
    VersionState,
)
from weighbridge.errors import FailedPrecondition, NotFound, VersionFailed, WeighbridgeError
from weighbridge_service.access.audit import note as note_change
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.peer import Peer
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import Approval, RequestEntry
from weighbridge_storage.documents.names import ModelName, check_request_id
from weighbridge_storage.head import requests
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History

log = logging.getLogger(__name__)

T = TypeVar("T")


class Gates:
    """Gates of all models. Thread-safe; any number of replicas may change them at the same time.

    A change of a ref that requires approvals becomes a pending request, named by its ``request_id``. Without a
    ``request_id`` it is refused.

    Args:
        catalog: the registered models.
        on_approved: called with each version that was approved here, and the approved reasons.
        named: returns the identity that the policy has under a name now; None if there is none.
    """

    def __init__(
        self,
        catalog: Catalog,
        on_approved: Callable[[ModelName, int, tuple[str, ...]], None],
        named: Callable[[str], Identity | None],
    ) -> None:
        self._catalog = catalog
        self._on_approved = on_approved
        self._named = named

    @property
    def held(self) -> int:
        """Number of held versions that this process has received, by the store, since other replicas may have approved
        or deleted them.

        For a model whose head cannot be read, the number that this process knew last.
        """
        return sum(self._held_of(model, numbers) for model, numbers in self._catalog.snapshots.held.items())

    def _held_of(self, model: ModelName, numbers: list[int]) -> int:
        try:
            history = self._catalog.history(model)
        except NotFound:
            return 0
        except WeighbridgeError:
            return len(numbers)
        return sum(self._is_held(model, number, history) for number in numbers)

    def _is_held(self, model: ModelName, number: int, history: History) -> bool:
        try:
            version = self._catalog.resolve(model, str(number), history)
        except (NotFound, VersionFailed):  # deleted, or given up since
            return False
        except WeighbridgeError:
            return True
        return bool(version.held) and version.state is not VersionState.RETIRED

    def approve_version(self, name: str, number: int, *, by: str, note: str, reasons: Iterable[str] = ()) -> Version:
        """Approve reasons for which a version is held. A version that is not held for these does not change.

        Args:
            name: the model.
            number: number of the version.
            by: name of the approver, as the caller gives it.
            note: note that is stored with the approval.
            reasons: the reasons to approve; if empty, all for which the version is held now.

        Returns:
            The version after the approval.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not complete yet, or was taken out of history.
            VersionFailed: the version has failed.
            InvalidArgument: a text is too long, or not printable.
        """
        model = ModelName.parse(name)
        found = self._catalog.resolve(model, str(number))
        if found.state is VersionState.RETIRED:
            raise FailedPrecondition(f"{found} was taken out of history", fix="push its weights again")
        wanted = {*reasons} or {*found.held}
        note_change(version=number, before=list(found.held))
        approved = tuple(reason for reason in found.held if reason in wanted)
        if not approved:
            return found
        approval = Approval(by, unix_ms(), note, approved)
        self._catalog.heads.edit(model, lambda history: (requests.approve_version(history, number, approval), None))
        log.info("%s was approved by %s: %s", found, by or "an unnamed caller", note or "no note")
        self._on_approved(model, number, approved)
        self._catalog.changes.notify(model)
        after = self._catalog.resolve(model, str(number))
        note_change(after=list(after.held), state=REQUEST_DONE)
        return after

    def move(
        self, name: str, ref: str, version: str, peer: Peer, *, request_id: str = "", note: str = ""
    ) -> tuple[Version, RefRequest]:
        """Move a tag to a durable version, or request the move if it requires approvals.

        Returns:
            The version, and the request, which is done or pending.

        Raises:
            NotFound: the version does not exist.
            FailedPrecondition: the version is not durable yet; or as `ask`.
            WeighbridgeError: as `ask`.
        """
        note_change(version=version)
        found = self._catalog.resolve(ModelName.parse(name), version)
        note_change(version=found.number)
        if not found.state.stored:
            raise FailedPrecondition(f"{found} is not in the object store yet", fix="wait until it is durable")
        return found, self.ask(name, ref, REQUEST_MOVE, peer, number=found.number, request_id=request_id, note=note)

    def ask(
        self,
        name: str,
        ref: str,
        action: str,
        peer: Peer,
        *,
        number: int = 0,
        request_id: str = "",
        note: str = "",
    ) -> RefRequest:
        """Move, delete or unprotect a ref, or request that. For `REQUEST_MOVE` see `move`.

        Raises NotFound, and the same errors as `requests.ask`.
        """
        asker = peer.asker(Verb.TAG, name, ref)
        wanted = _wanted(ref, action, asker.name, request_id, note, number)
        return self._change_ref(
            ModelName.parse(name),
            lambda history: requests.ask(history, wanted, asker, may_wait=bool(request_id)),
            f"asked for by {asker.name}",
        )

    def approve_ref(self, name: str, ref: str, request_id: str, peer: Peer, *, note: str = "") -> RefRequest:
        """Approve a request. The last approval that it takes carries it out.

        Raises the same errors as `requests.approve_request`.
        """
        model, asker = ModelName.parse(name), peer.asker(Verb.APPROVE, name, ref)
        standing = self._standing(model, ref)
        return self._change_ref(
            model,
            lambda history: requests.approve_request(
                history, ref, request_id, asker, standing, now_ms=unix_ms(), note=note
            ),
            f"approved by {asker.name}",
        )

    def withdraw_ref(self, name: str, ref: str, request_id: str, peer: Peer) -> RefRequest:
        """End a request without carrying it out. Raises the same errors as `requests.withdraw_request`."""
        asker = peer.asker(Verb.TAG, name, ref)
        return self._change_ref(
            ModelName.parse(name),
            lambda history: requests.withdraw_request(history.head, ref, request_id, asker, now_ms=unix_ms()),
            f"withdrawn by {asker.name}",
        )

    def protect(self, name: str, ref: str, approvals: int, peer: Peer) -> tuple[Protection, ...]:
        """Protect a ref, or raise the number of approvals that its changes require.

        Raises NotFound, and the same errors as `requests.protect`.

        Returns:
            All protections of the model.
        """
        model, asker = ModelName.parse(name), peer.asker(Verb.TAG, name, ref)
        wanted = _wanted(ref, REQUEST_PROTECT, asker.name, "", "")

        def change(history: History) -> tuple[Head, Head]:
            after = requests.protect(history.head, wanted, approvals, asker)
            return after, after

        after = self._change(model, change, lambda head, _: _value(head, wanted))
        log.info("%s: %s is protected by %d approvals, set by %s", model, ref, approvals, asker.name)
        return _protections(after)

    def refs(self, name: str, head: Head | None = None) -> ModelRefs:
        """Refs of a model, with the protected ones and the requests to change them, from one read of its head: from
        ``head``, if given.

        Raises NotFound.
        """
        model = ModelName.parse(name)
        head = self._catalog.head(model) if head is None else head
        asked = requests.expire(head, unix_ms())
        return ModelRefs(
            refs=self._catalog.refs_of(model, head),
            protections=_protections(head),
            requests=tuple(self._shown(model, asked, each) for each in asked.requests),
        )

    def _change(
        self,
        model: ModelName,
        change: Callable[[History], tuple[Head, T]],
        value: Callable[[Head, T], object],
    ) -> T:
        """Change a head, and record the value before and after in the audit log."""

        def noted(history: History) -> tuple[Head, tuple[T, object, object]]:
            head, result = change(history)
            return head, (result, value(history.head, result), value(head, result))

        result, before, after = self._catalog.heads.edit(model, noted)
        asked = result if isinstance(result, RefRequest) else None
        if asked is not None and asked.version:
            note_change(version=asked.version)
        note_change(before=before, after=after, state=REQUEST_DONE if asked is None else asked.state)
        self._catalog.changes.notify(model)
        return result

    def _change_ref(
        self, model: ModelName, change: Callable[[History], tuple[Head, RequestEntry]], what: str
    ) -> RefRequest:
        def shown(history: History) -> tuple[Head, RefRequest]:
            head, entry = change(history)
            return head, self._shown(model, head, entry)

        found = self._change(model, shown, _value)
        to = f" to {found.version}" if found.version else ""
        log.info("%s: to %s %s%s: %s, %s", model, found.action, found.ref, to, what, found.state)
        return found

    def _standing(self, model: ModelName, ref: str) -> requests.Standing:
        def may(verb: Verb, name: str) -> bool:
            identity = self._named(name)
            return identity is not None and identity.names(verb, str(model), ref)

        return requests.Standing(partial(may, Verb.TAG), partial(may, Verb.APPROVE))

    def _shown(self, model: ModelName, head: Head, entry: RequestEntry) -> RefRequest:
        """The request as clients see it."""
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
            missing=requests.missing(head, entry, self._standing(model, entry.ref)),
        )


def _wanted(ref: str, action: str, by: str, request_id: str, note: str, number: int = 0) -> RequestEntry:
    now_ms = unix_ms()
    named = requests.request_name(check_request_id(request_id or uuid.uuid4().hex), by, secrets.token_hex(8))
    return RequestEntry(named, ref, action, by, now_ms, now_ms + requests.LIFETIME_MS, version=number, note=note)


def _value(head: Head, wanted: RequestEntry | RefRequest) -> object:
    """Value in a head that a request changes: the number that the ref names, or the approvals that its changes require;
    None if not set.
    """
    if wanted.action in (REQUEST_PROTECT, REQUEST_UNPROTECT):
        protection = head.protected.get(wanted.ref)
        return None if protection is None else {"approvals": protection.approvals}
    return head.ref_numbers.get(wanted.ref)


def _protections(head: Head) -> tuple[Protection, ...]:
    return tuple(Protection(ref, each.approvals) for ref, each in sorted(head.protected.items()))
