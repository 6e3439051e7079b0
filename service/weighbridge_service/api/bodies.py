"""Bodies of the operations in the table: the implementation of each operation, shared by the gRPC and HTTP servers."""

from __future__ import annotations

from weighbridge._core.metadata import conditions
from weighbridge._core.reports.collection import Collection
from weighbridge._core.reports.usage import Usage
from weighbridge._core.resources import (
    REQUEST_DELETE,
    REQUEST_UNPROTECT,
    Gate,
    Model,
    ModelRefs,
    Protection,
    RefMove,
    RefRequest,
    Retention,
    Verification,
    Version,
    WarmMemory,
)
from weighbridge.errors import InvalidArgument
from weighbridge_service.access.peer import Peer
from weighbridge_service.catalog.head_versions import number_in
from weighbridge_service.core import Core
from weighbridge_service.push.image_allocator import IMAGES_OF_A_MODEL

PAGE = 100
"""Default number of items in a page."""


def version_before(token: str) -> int:
    """Number below which a page of versions begins, from the page token; 0 for the first page. Raises
    InvalidArgument.
    """
    number = number_in(token or "0")
    if number is None:
        raise InvalidArgument(
            f"{token[:40]!r} is not a page token", fix="pass the token that the previous page returned"
        )
    return number


class Bodies:
    """Implementations of the operations: one method for each operation, with the operation's name. It receives the
    caller and the operation's arguments by name.

    The method of a paged list also has the arguments ``after`` and ``size``. It returns up to ``size`` items after the
    item named ``after``.

    Args:
        core: the core of the service.
    """

    def __init__(self, core: Core) -> None:
        self._catalog = core.catalog
        self._collecting = core.collecting
        self._gates = core.gates
        self._intake = core.intake
        self._quotas = core.quotas

    def get_model(self, peer: Peer, *, model: str) -> Model:
        return self._catalog.get_model(model, peer.sees)

    def list_models(self, peer: Peer, *, after: str, size: int) -> list[Model]:
        return self._catalog.list_models(after, size, peer.sees)

    def list_versions(
        self,
        peer: Peer,
        *,
        model: str,
        include_invisible: bool,
        where: tuple[str, ...],
        after: str,
        size: int,
    ) -> list[Version]:
        return self._catalog.list_versions(
            model,
            before=version_before(after),
            limit=size,
            include_invisible=include_invisible,
            where=conditions(where),
        )

    def verify_version(self, peer: Peer, *, model: str, version: str, sha256: bool) -> Verification:
        return self._catalog.verify(model, version, sha256=sha256)

    def set_ref(self, peer: Peer, *, model: str, ref: str, version: str, request_id: str, note: str) -> RefMove:
        return RefMove(*self._gates.move(model, ref, version, peer, request_id=request_id, note=note))

    def delete_ref(self, peer: Peer, *, model: str, ref: str, request_id: str, note: str) -> RefRequest:
        return self._gates.ask(model, ref, REQUEST_DELETE, peer, request_id=request_id, note=note)

    def approve_ref(self, peer: Peer, *, model: str, ref: str, request_id: str, note: str) -> RefRequest:
        return self._gates.approve_ref(model, ref, request_id, peer, note=note)

    def withdraw_ref(self, peer: Peer, *, model: str, ref: str, request_id: str) -> RefRequest:
        return self._gates.withdraw_ref(model, ref, request_id, peer)

    def protect_ref(self, peer: Peer, *, model: str, ref: str, approvals: int) -> list[Protection]:
        return list(self._gates.protect(model, ref, approvals, peer))

    def unprotect_ref(self, peer: Peer, *, model: str, ref: str, request_id: str, note: str) -> RefRequest:
        return self._gates.ask(model, ref, REQUEST_UNPROTECT, peer, request_id=request_id, note=note)

    def list_refs(self, peer: Peer, *, model: str) -> ModelRefs:
        return self._gates.refs(model)

    def get_retention(self, peer: Peer, *, model: str) -> Retention:
        return self._catalog.kept(model, Retention)

    def set_retention(self, peer: Peer, *, model: str, retention: Retention) -> Retention:
        return self._collecting.set_retention(model, retention)

    def get_gate(self, peer: Peer, *, model: str) -> Gate:
        return self._catalog.kept(model, Gate)

    def set_gate(self, peer: Peer, *, model: str, gate: Gate) -> Gate:
        return self._catalog.keep(model, gate)

    def approve_version(
        self, peer: Peer, *, model: str, number: int, by: str, note: str, reasons: tuple[str, ...]
    ) -> Version:
        by = peer.called(by)
        return self._gates.approve_version(model, number, by=by, note=note, reasons=reasons)

    def delete_version(self, peer: Peer, *, model: str, number: int, force: bool) -> Version:
        return self._collecting.delete_version(model, number, forced=force, sees=peer.sees)

    def collect_versions(self, peer: Peer, *, model: str, dry_run: bool) -> Collection:
        return self._collecting.collect(model, dry_run=dry_run)

    def warm_model(self, peer: Peer, *, model: str) -> WarmMemory:
        images, image_bytes = self._intake.warm(model)
        return WarmMemory(model, images, IMAGES_OF_A_MODEL, image_bytes)

    def get_usage(self, peer: Peer) -> Usage:
        return self._quotas.usage(peer)
