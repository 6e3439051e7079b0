"""Is the table of operations that of the contract, and do both faces and both clients have what it says?"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tests.service.api.grpc.test_asking import CALLS
from tests.service.api.http.web import Web
from weighbridge import Client
from weighbridge._core.operations import table
from weighbridge._core.operations.operation import REQUIRED, Of, Operation, OperationEntry
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import (
    Gate,
    Model,
    ModelRefs,
    Protection,
    RefApproval,
    RefMove,
    RefRequest,
    Retention,
    Version,
    VersionState,
)
from weighbridge._transport.wire_operations import descriptor_of, messages_of
from weighbridge.aio import AsyncEngineClient
from weighbridge_service.api.bodies import Bodies

ROOT = Path(__file__).parents[4]
PAGES = {"page_size", "page_token"}
KINDS = {
    str: FieldDescriptor.CPPTYPE_STRING,
    bool: FieldDescriptor.CPPTYPE_BOOL,
    tuple[str, ...]: FieldDescriptor.CPPTYPE_STRING,
}
derived = pytest.mark.parametrize("operation", table.OPERATIONS, ids=lambda each: each.rpc)


def test_each_method_of_the_contract_is_one_entry_and_says_who_may_call_it() -> None:
    contract = {f"{service}.{method.name}" for service, method in CALLS}
    contract -= {name for name in contract if name.startswith(("Health.", "ServerReflection."))}
    assert sorted(each.method for each in table.ENTRIES) == sorted(contract)
    with pytest.raises(TypeError, match="verb"):
        OperationEntry("ModelService.GetModel", of=Of.MODEL)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="of"):
        OperationEntry("ModelService.GetModel", Verb.LOOK)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes"):
        Operation("ModelService.GetModel", Verb.LOOK, Of.MODEL, Model, "model", text="One model.")


@pytest.mark.parametrize("entry", table.ENTRIES, ids=lambda each: each.rpc)
def test_what_a_caller_must_be_allowed_to_do_it_for_is_named_by_the_request(entry: OperationEntry) -> None:
    names = {each.name for each in descriptor_of(entry).input_type.fields}
    assert names.issuperset(entry.of.value)
    if "model" in names and entry.method != "LocalLaneService.GetLocalLane":
        assert entry.of is not Of.NOTHING


@derived
def test_a_request_has_the_fields_that_an_operation_takes_and_a_response_those_that_it_gives(
    operation: Operation[Any],
) -> None:
    method = descriptor_of(operation)
    request = {each.name: each for each in method.input_type.fields}
    assert {each.name for each in operation.takes} == request.keys() - PAGES
    assert (request.keys() >= PAGES) == bool(operation.pages)
    for each in operation.takes:
        if dataclasses.is_dataclass(each.kind):
            assert {f.name for f in request[each.name].message_type.fields} == fields_of(each.kind)
        elif each.kind in KINDS:
            assert request[each.name].cpp_type == KINDS[each.kind]
            assert request[each.name].is_repeated == (each.kind == tuple[str, ...])
        else:
            assert each.kind is int
            assert request[each.name].cpp_type in (
                FieldDescriptor.CPPTYPE_UINT64,
                FieldDescriptor.CPPTYPE_UINT32,
            )
    response = {each.name: each for each in method.output_type.fields}
    if operation.within:
        assert response.keys() == {operation.within} | ({"next_page_token"} if operation.pages else set())
        assert {f.name for f in response[operation.within].message_type.fields} == fields_of(operation.gives)
        assert response[operation.within].is_repeated == bool(operation.order)
    else:
        assert response.keys() == fields_of(operation.gives)


def fields_of(kind: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}


@derived
def test_a_body_takes_and_gives_what_the_table_says(operation: Operation[Any]) -> None:
    body = getattr(Bodies, operation.name)
    hints = typing.get_type_hints(body)
    kinds = {each.name: each.kind for each in operation.takes}
    if operation.pages:
        kinds |= {"after": str, "size": int}
    given = list[operation.gives] if operation.order else operation.gives  # type: ignore[name-defined]
    assert hints.pop("return") == given
    hints.pop("peer")
    assert hints == kinds


@derived
@pytest.mark.parametrize("client", [Client, AsyncEngineClient])
def test_a_method_of_a_client_takes_what_the_table_says(operation: Operation[Any], client: type[Any]) -> None:
    if not operation.call:
        return
    method = getattr(client, operation.call)
    said = inspect.signature(method).parameters
    expected = {"version" if each.name == "number" else each.name: each.default for each in operation.offers}
    assert list(said) == ["self", *expected]
    for name, default in expected.items():
        wanted = inspect.Parameter.empty if default is REQUIRED else default
        assert said[name].default == (None if name == "version" else wanted)
    given = typing.get_type_hints(operation.gives)[operation.part] if operation.part else operation.gives
    given = list[given] if operation.order else given  # type: ignore[valid-type]
    assert typing.get_type_hints(method)["return"] == (type(None) if operation.part is None else given)
    assert inspect.iscoroutinefunction(method) == (client is AsyncEngineClient)


def test_methods_of_clients_public_names_and_the_table_of_access_are_what_declarations_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "protos.derive", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_each_route_of_the_table_is_one_of_http(web: Web) -> None:
    paths = web.app.openapi()["paths"]
    found = {(said["operationId"], path, method) for path, of in paths.items() for method, said in of.items()}
    for each in table.ENTRIES:
        if each.http:
            method, _, path = each.http.partition(" ")
            path = path.replace("{model}", "{namespace}/{name}").replace("{number}", "{version}")
            assert (each.name, path, method.lower()) in found


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (table.GET_GATE, {"model": "a/b"}),
        (table.SET_GATE, {"model": "a/b", "gate": Gate(approval_required=True)}),
        (table.SET_RETENTION, {"model": "a/b", "retention": Retention(keep_last=3, keep_every_steps=7)}),
        (table.DELETE_VERSION, {"model": "a/b", "number": 2**40, "force": True}),
        (table.SET_REF, {"model": "a/b", "ref": "prod", "version": "7", "request_id": "q", "note": "é"}),
        (
            table.APPROVE_VERSION,
            {"model": "a/b", "number": 7, "by": "me", "note": "", "reasons": ("candidate", "nonfinite")},
        ),
        (table.APPROVE_REF, {"model": "a/b", "ref": "prod", "request_id": "q", "note": "é"}),
    ],
    ids=lambda each: getattr(each, "rpc", ""),
)
def test_arguments_come_over_the_wire_as_they_were(operation: Operation[Any], arguments: dict[str, Any]) -> None:
    messages = messages_of(operation)
    raw = messages.request(arguments).SerializeToString()
    kind: Any = descriptor_of(operation).input_type._concrete_class
    assert messages.arguments(kind.FromString(raw)) == arguments


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        (table.GET_GATE, Gate(allow_nonfinite=True)),
        (
            table.DELETE_VERSION,
            Version("a/b", 7, VersionState.RETIRED, held=("nonfinite",), metadata={"reward": 0.5, "ok": True}),
        ),
        (
            table.SET_REF,
            RefMove(
                Version("a/b", 7, VersionState.DURABLE, held=("candidate",), metadata={"reward": 0.5}),
                RefRequest("a/b", "prod", "move", "pending", 7, approvals=(RefApproval("me", 3, "é"),)),
            ),
        ),
        (table.SET_PROTECTION, [Protection("prod", 2), Protection("test")]),
        (
            table.LIST_REFS,
            ModelRefs({"latest": 7}, (Protection("prod"),), (RefRequest("a/b", "prod", "move", "done", 7),)),
        ),
        (
            table.LIST_MODELS,
            [Model(name, "llama", "BF16", 3, 9, ("config.json",), {"live": 2}) for name in ("a/b", "a/c")],
        ),
    ],
    ids=lambda each: getattr(each, "rpc", ""),
)
def test_answers_come_over_the_wire_as_they_were(operation: Operation[Any], answer: Any) -> None:
    messages = messages_of(operation)
    assert messages.answer(messages.read(messages.response(answer).SerializeToString())) == answer
