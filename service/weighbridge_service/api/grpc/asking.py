"""Subject of a call: the verb of its method, and the models and refs that its request names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weighbridge_service.admission.peer import Peer, Verb, authorize

VERBS = {
    "CheckpointService": {
        "OpenVersion": Verb.PUSH,
        "DeclareLayout": Verb.PUSH,
        "Push": Verb.PUSH,
        "GetPushState": Verb.PUSH,
        "SealRank": Verb.PUSH,
        "AbortVersion": Verb.PUSH,
        "Restore": Verb.READ,
        "DescribeShards": Verb.READ,
    },
    "ModelService": {
        "RegisterModel": Verb.MANAGE,
        "GetModel": Verb.READ,
        "ListModels": Verb.READ,
        "GetModelFiles": Verb.READ,
        "GetVersion": Verb.READ,
        "ListVersions": Verb.READ,
        "WatchRefs": Verb.READ,
        "SetRef": Verb.MANAGE,
        "DeleteRef": Verb.MANAGE,
        "ListRefs": Verb.READ,
        "VerifyVersion": Verb.READ,
        "GetRetention": Verb.READ,
        "SetRetention": Verb.MANAGE,
        "GetGate": Verb.READ,
        "SetGate": Verb.MANAGE,
        "ApproveVersion": Verb.APPROVE,
        "DeleteVersion": Verb.MANAGE,
        "DeleteModel": Verb.MANAGE,
        "CollectVersions": Verb.MANAGE,
        "WarmModel": Verb.PUSH,
    },
    "WeightService": {"PlanPull": Verb.READ, "Pull": Verb.READ},
    "BulkService": {"GetTicket": Verb.READ},
    "LocalLaneService": {"GetLocalLane": Verb.READ},
    "ReplicaService": {
        "Exchange": Verb.REPLICATE,
        "ReadFile": Verb.REPLICATE,
        "TakeOver": Verb.REPLICATE,
    },
    "Health": {"Check": Verb.READ, "List": Verb.READ, "Watch": Verb.READ},
    "ServerReflection": {"ServerReflectionInfo": Verb.READ},
}
"""By service and method of the contract."""


def check_allowed(peer: Peer, verb: Verb, request: Any) -> None:
    """Raise if a peer may not do what a request asks for. See `authorize`."""
    for model, ref in _named(request):
        authorize(peer, verb, model, ref)


def _named(request: Any) -> Iterator[tuple[str, str]]:
    """The models and refs that a request is about."""
    message = getattr(request, "message", request)  # of one that carries weights
    header = getattr(message, "header", message)  # which names the model for all that follow
    refs = getattr(header, "refs", None)
    for each in (header,) if refs is None else refs:
        model = getattr(each, "model", "")
        yield model, getattr(each, "ref", "") or _version(each)


def _version(message: Any) -> str:
    version = getattr(message, "version", "") or getattr(message, "number", "")
    return str(version) if version and isinstance(version, str | int) else ""
