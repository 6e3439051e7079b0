"""Calls that change refs, or request the change if it needs the approval of other identities."""

from __future__ import annotations

import uuid

from weighbridge._clients.calls.operation_calls import ask
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.calls.version_calls import get_version
from weighbridge._core.operations import table
from weighbridge._core.operations.operation import Operation
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, RefRequest


def request_ref(model: str, ref: str, version: str | int | None, note: str, request_id: str) -> Steps[RefRequest]:
    """Set a tag to a version, or request the change.

    If the call is repeated, it requests the same version number again.
    """
    meant = Reference.of(model, version, REF_LATEST)
    number = (yield from get_version(meant.model, meant.version)).number
    named = request_id or uuid.uuid4().hex
    moved = yield from ask(table.SET_REF, model=meant.model, ref=ref, version=str(number), request_id=named, note=note)
    return moved.request


def request_by(operation: Operation[RefRequest], model: str, ref: str, note: str, request_id: str) -> Steps[RefRequest]:
    """Change a ref by an operation, or request the change."""
    named = request_id or uuid.uuid4().hex
    return (yield from ask(operation, model=model, ref=ref, request_id=named, note=note))
