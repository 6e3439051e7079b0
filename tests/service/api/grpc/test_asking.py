"""Is every call authorized, with the right model and ref?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from weighbridge._core.operations.verbs import Verb
from weighbridge._transport import pieces
from weighbridge.v1 import (
    bulk_service_pb2,
    checkpoint_service_pb2,
    engine_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)
from weighbridge_service.access.audit import Audit
from weighbridge_service.access.peer import Peer
from weighbridge_service.api.grpc import asking
from weighbridge_service.api.grpc.health_handlers import HEALTH, REFLECTION

PEER = Peer("10.0.0.7", "1")
MODULES = (
    bulk_service_pb2,
    checkpoint_service_pb2,
    engine_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)
SERVICES = [
    *(service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()),
    HEALTH,
    REFLECTION,
]
CALLS = [(method.containing_service.name, method) for service in SERVICES for method in service.methods]
models, checkpoints, weights = model_service_pb2, checkpoint_service_pb2, weight_service_pb2


def call_of_peer() -> Any:
    """The parts of a call that authorization reads: its peer, and no named model."""
    return SimpleNamespace(peer=PEER, named=())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Peer, Verb, str, str]]:
    found = list[tuple[Peer, Verb, str, str]]()
    monkeypatch.setattr(
        asking,
        "authorize",
        lambda peer, verb, model="", ref="": found.append((peer, verb, model, ref)),
    )
    return found


def test_verbs_are_those_of_the_methods_of_the_contract_and_no_others() -> None:
    contract = {service.name: {method.name for method in service.methods} for service in SERVICES}
    contract["Health"].add("List")  # which the library of grpcio 1.76 lacks, and later ones have
    assert {name: set(methods) for name, methods in asking.VERBS.items()} == contract


def test_what_changes_something_needs_more_than_to_read() -> None:
    reading = {
        f"{service}.{method}"
        for service, methods in asking.VERBS.items()
        for method, verb in methods.items()
        if verb in (Verb.LOOK, Verb.PULL, Verb.PROBE, Verb.OBSERVE)
    }
    assert asking.VERBS["ModelService"]["ApproveVersion"] is Verb.APPROVE
    changing = (
        "Set",
        "Approve",
        "Delete",
        "Register",
        "Push",
        "Open",
        "Declare",
        "Seal",
        "Abort",
        "Collect",
        "Take",
        "Add",
    )
    assert not [name for name in reading if name.partition(".")[2].startswith(changing)]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (models.GetModelRequest(model="a/b"), [("a/b", "")]),
        (models.ListModelsRequest(), [("", "")]),
        (models.RegisterModelRequest(model="a/b"), [("a/b", "")]),
        (models.GetModelFilesRequest(model="a/b", version="7"), [("a/b", "7")]),
        (models.GetVersionRequest(model="a/b", version="live"), [("a/b", "live")]),
        (models.SetRefRequest(model="a/b", ref="prod", version="7"), [("a/b", "prod")]),
        (models.ApproveRefRequest(model="a/b", ref="prod", request_id="q"), [("a/b", "prod")]),
        (models.SetProtectionRequest(model="a/b", ref="prod"), [("a/b", "prod")]),
        (models.DeleteRefRequest(model="a/b", ref="prod"), [("a/b", "prod")]),
        (models.DeleteVersionRequest(model="a/b", number=7), [("a/b", "7")]),
        (models.ApproveVersionRequest(model="a/b", number=7), [("a/b", "7")]),
        (models.VerifyVersionRequest(model="a/b", version="7"), [("a/b", "7")]),
        (models.SetRetentionRequest(model="a/b"), [("a/b", "")]),
        (
            models.WatchRefsRequest(
                refs=[
                    models.WatchedRef(model="a/b", ref="live"),
                    models.WatchedRef(model="c/d", ref="prod", after=3),
                ]
            ),
            [("a/b", "live"), ("c/d", "prod")],
        ),
        (models.WatchRefsRequest(), [("", "")]),
        (weights.PullRequest(model="a/b", version="live"), [("a/b", "live")]),
        (checkpoints.RestoreRequest(model="a/b", version="7"), [("a/b", "7")]),
        (checkpoints.OpenVersionRequest(model="a/b"), [("a/b", "")]),
        (checkpoints.SealRankRequest(model="a/b", number=7), [("a/b", "7")]),
        (replica_service_pb2.ReadFileRequest(model="a/b", number=7), [("a/b", "7")]),
        (replica_service_pb2.TakeOverRequest(model="a/b"), [("a/b", "")]),
        (replica_service_pb2.ExchangeRequest(), [("", "")]),
        (bulk_service_pb2.GetTicketRequest(), [("", "")]),
        (
            engine_service_pb2.ReportEngineRequest(
                report=engine_service_pb2.EngineReport(model="a/b", ref="live", version=7)
            ),
            [("a/b", "live")],
        ),
        (engine_service_pb2.ListEnginesRequest(model="a/b"), [("a/b", "")]),
    ],
)
def test_a_request_is_asked_for_the_models_and_refs_that_it_names(
    request_: Any, named: list[tuple[str, str]], asked: list[tuple[Peer, Verb, str, str]]
) -> None:
    asking.check_allowed(call_of_peer(), Verb.PULL, request_, Audit(None))
    assert asked == [(PEER, Verb.PULL, *each) for each in named]


def test_the_header_of_a_push_names_the_model_for_all_that_follow(
    asked: list[tuple[Peer, Verb, str, str]],
) -> None:
    header = checkpoints.PushHeader(model="a/b", number=7)
    raw = checkpoints.PushRequest(header=header).SerializeToString()
    decode = pieces.decoder(checkpoints.PushRequest)
    asking.check_allowed(call_of_peer(), Verb.PUSH, decode(raw), Audit(None))
    assert asked == [(PEER, Verb.PUSH, "a/b", "7")]


@pytest.mark.parametrize(("service", "method"), CALLS, ids=lambda each: getattr(each, "full_name", ""))
def test_every_request_that_has_a_model_is_asked_for_it(
    service: str, method: Any, asked: list[tuple[Peer, Verb, str, str]]
) -> None:
    kind = GetMessageClass(method.input_type)
    fields = method.input_type.fields_by_name
    if "refs" in fields:
        request = kind(refs=[{"model": "a/b"}])
    elif "header" in fields:
        request = kind(header={"model": "a/b"})
    elif "report" in fields:
        request = kind(report={"model": "a/b"})
    else:
        request = kind(**({"model": "a/b"} if "model" in fields else {}))
    asking.check_allowed(call_of_peer(), asking.VERBS[service][method.name], request, Audit(None))
    named = "a/b" if {"model", "refs", "header", "report"} & set(fields) else ""
    assert asked == [(PEER, asking.VERBS[service][method.name], named, "")]


def test_an_answer_of_no_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(peer: Peer, verb: Verb, model: str, ref: str) -> None:
        if model == "c/d":
            raise PermissionError

    monkeypatch.setattr(asking, "authorize", refuse)
    refs = [models.WatchedRef(model=name, ref="live") for name in ("a/b", "c/d", "e/f")]
    call = call_of_peer()
    with pytest.raises(PermissionError):
        asking.check_allowed(call, Verb.PULL, models.WatchRefsRequest(refs=refs), Audit(None))
    assert call.named == (("c/d", "live"),), "one line of the audit log, however many refs there are"
