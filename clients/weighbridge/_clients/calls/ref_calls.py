"""Calls about refs: which version each names, changes, and requests for those that are protected."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from weighbridge._clients.calls.steps import Steps, call_method
from weighbridge._clients.calls.version_calls import get_version
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, Protection, RefRequest, Version
from weighbridge._transport import wire
from weighbridge.v1 import model_service_pb2 as pb

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["ModelService"])


def list_refs(model: str) -> Steps[dict[str, int]]:
    """Version number by ref."""
    return dict((yield from _call("ListRefs", pb.ListRefsRequest(model=model))).refs)


def ref_requests(model: str) -> Steps[list[RefRequest]]:
    """Requests to change protected refs."""
    response = yield from _call("ListRefs", pb.ListRefsRequest(model=model))
    return [wire.read(RefRequest, each) for each in response.requests]


def set_ref(model: str, ref: str, version: str | int | None) -> Steps[Version]:
    """Let a tag name a version; is refused if that takes approvals."""
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.SetRefRequest(model=meant.model, ref=ref, version=meant.version)
    return wire.version_from_proto((yield from _call("SetRef", request)).version)


def request_ref(
    model: str, ref: str, version: str | int | None, note: str, request_id: str
) -> Steps[RefRequest]:
    """Let a tag name a version, or ask for it. One number is asked for, whatever the call is repeated for."""
    meant = Reference.of(model, version, REF_LATEST)
    number = (yield from get_version(meant.model, meant.version)).number
    request = pb.SetRefRequest(
        model=meant.model, ref=ref, version=str(number), request_id=request_id or uuid.uuid4().hex, note=note
    )
    return (yield from _asked("SetRef", request))


def delete_ref(model: str, ref: str) -> Steps[None]:
    """Take a tag away; is refused if that takes approvals."""
    yield from _call("DeleteRef", pb.DeleteRefRequest(model=model, ref=ref))


def request_ref_deletion(model: str, ref: str, note: str, request_id: str) -> Steps[RefRequest]:
    """Take a tag away, or ask for it."""
    request = pb.DeleteRefRequest(model=model, ref=ref, request_id=request_id or uuid.uuid4().hex, note=note)
    return (yield from _asked("DeleteRef", request))


def protections(model: str) -> Steps[list[Protection]]:
    """What it takes to change the refs that are protected."""
    response = yield from _call("ListRefs", pb.ListRefsRequest(model=model))
    return [wire.read(Protection, each) for each in response.protections]


def protect_ref(model: str, ref: str, approvals: int) -> Steps[list[Protection]]:
    """Protect a ref."""
    request = pb.SetProtectionRequest(model=model, ref=ref, approvals=approvals)
    response = yield from _call("SetProtection", request)
    return [wire.read(Protection, each) for each in response.protections]


def unprotect_ref(model: str, ref: str, note: str, request_id: str) -> Steps[RefRequest]:
    """Protect a ref no longer, or ask for it."""
    request = pb.DeleteProtectionRequest(
        model=model, ref=ref, request_id=request_id or uuid.uuid4().hex, note=note
    )
    return (yield from _asked("DeleteProtection", request))


def _asked(method: str, request: Any) -> Steps[RefRequest]:
    """The request that a call has made or changed, as it stands after that."""
    return wire.read(RefRequest, (yield from _call(method, request)).request)
