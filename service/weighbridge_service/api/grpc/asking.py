"""Subject of a call: the verb of its method, and the models and refs that its request names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from weighbridge._core.operations.table import ENTRIES
from weighbridge._core.operations.verbs import Verb
from weighbridge_service.access.audit import Audit, note
from weighbridge_service.access.peer import authorize
from weighbridge_service.api.grpc.call import Call

VERBS: dict[str, dict[str, Verb]] = {
    "Health": {"Check": Verb.PROBE, "List": Verb.PROBE, "Watch": Verb.PROBE},
    "ServerReflection": {"ServerReflectionInfo": Verb.OBSERVE},
}
for _each in ENTRIES:
    VERBS.setdefault(_each.service, {})[_each.rpc] = _each.verb
"""Verbs by service and method, for the contract and for gRPC's own services."""
LONG = frozenset(each.method for each in ENTRIES if each.takes_long)
"""Methods that read a whole version, or process all versions of a model."""


def check_allowed(call: Call, verb: Verb, request: Any, audit: Audit) -> None:
    """Raise if a caller may not do what a request asks for, or if the audit log cannot record it; see `authorize` and
    `Audit.check`.

    Sets ``call.named`` to the models and refs that the request names; if the call is refused, only to the refused one.
    """
    version = _version(request)
    if version and getattr(request, "ref", None) is not None:
        note(version=version)
    allowed: list[tuple[str, str]] = []
    for each in named(request):
        call.named = (each,)
        authorize(call.peer, verb, *each)
        allowed.append(each)
    call.named = tuple(allowed)
    audit.check(verb)


def record(audit: Audit, call: Call, method: MethodDescriptor, code: str) -> None:
    """Record the end of a call in the audit log."""
    verb = VERBS[method.containing_service.name][method.name]
    for model, ref in call.named or (("", ""),):
        audit.record(
            face="grpc",
            host=call.peer.host,
            identity=call.peer.identity.name,
            action=method.name,
            verb=verb,
            model=model,
            ref=ref,
            result=code,
            noted=call.noted,
            heartbeat=method.name == "ReportEngine",
        )


def named(request: Any) -> Iterator[tuple[str, str]]:
    """Yield the models and refs that a request names."""
    message = getattr(request, "message", request)  # a request with weights wraps its message
    header = getattr(message, "header", message)  # the header names the model for all further messages
    header = getattr(header, "report", header)  # an engine's report names its model
    refs = getattr(header, "refs", None)
    for each in refs or (header,):  # an empty list of refs is authorized like a request without a model
        model = getattr(each, "model", "")
        yield model, getattr(each, "ref", "") or _version(each)


def _version(message: Any) -> str:
    version = getattr(message, "version", "") or getattr(message, "number", "")
    return str(version) if version and isinstance(version, str | int) else ""
