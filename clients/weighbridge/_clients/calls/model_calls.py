"""Calls about models: registration, files, rules of what is kept and held, memory, collection, limits."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.calls.steps import Steps, call_method
from weighbridge._core import dtypes
from weighbridge._core.file_names import is_file_name
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.references import Reference
from weighbridge._core.reports.collection import Collection
from weighbridge._core.reports.usage import Usage
from weighbridge._core.resources import DeletedModel, Gate, Model, Retention, WarmMemory
from weighbridge._transport import wire
from weighbridge._transport.request_parts import MAX_REQUEST_BYTES
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2

if TYPE_CHECKING:
    import torch

_LONG_SECONDS = 3600.0
"""Deadline of calls that go over all of a model."""
_REGISTERING_SECONDS = 660.0
"""Deadline of a registration: longer than a service gives the process that makes weight maps for two of them, whose first one waits for imports."""

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["ModelService"])


def register_model(
    model: str,
    files: Mapping[str, bytes],
    dtype: str | torch.dtype,
    tensors: Iterable[TensorSpec],
    weight_map: bool,
) -> Steps[Model]:
    """Register a model by the content of its files.

    Raises:
        FailedPrecondition: the service is too old to do without a weight map.
    """
    size = sum(map(len, files.values()))
    if size > MAX_REQUEST_BYTES - (1 << 20):
        raise InvalidArgument(f"the files besides the weights have {size} bytes together, more than 63 MiB")
    request = pb.RegisterModelRequest(
        model=model,
        files=[resources_pb2.ModelFile(name=name, content=content) for name, content in files.items()],
        dtype=dtypes.parse(dtype).short if dtype else "",
        request_id=str(uuid.uuid4()),
        tensors=map(wire.spec_to_proto, tensors),
        no_weight_map=not weight_map,
    )
    registered = wire.read(Model, (yield from _call("RegisterModel", request, _REGISTERING_SECONDS)).model)
    if registered.weight_map and not weight_map:
        raise FailedPrecondition(
            f"the service has registered {model} with a weight map: it cannot do without",
            fix="update the service to this client's version",
        )
    return registered


def get_model(model: str) -> Steps[Model]:
    """One model."""
    response = yield from _call("GetModel", pb.GetModelRequest(model=model))
    return wire.read(Model, response.model)


def list_models() -> Steps[list[Model]]:
    """All models, page by page."""
    found: list[Model] = []
    request = pb.ListModelsRequest()
    while True:
        page = yield from _call("ListModels", request)
        found += [wire.read(Model, each) for each in page.models]
        if not page.next_page_token:
            return found
        request = pb.ListModelsRequest(page_token=page.next_page_token)


def model_files(model: str, version: str | int | None) -> Steps[dict[str, bytes]]:
    """The files besides the weights; refuses names that would lead out of the model's folder."""
    meant = Reference.of(model, version)
    request = pb.GetModelFilesRequest(model=meant.model, version=meant.version)
    files = (yield from _call("GetModelFiles", request)).files
    for file in files:
        if not is_file_name(file.name):
            raise DataLoss(f"the service says that {meant.model} has a file {file.name[:200]!r}")
    return {file.name: file.content for file in files}


def get_retention(model: str) -> Steps[Retention]:
    """Which versions are kept."""
    response = yield from _call("GetRetention", pb.GetRetentionRequest(model=model))
    return wire.read(Retention, response.retention)


def set_retention(model: str, retention: Retention) -> Steps[Retention]:
    """Say which versions are kept."""
    request = pb.SetRetentionRequest(model=model, retention=wire.write(resources_pb2.Retention, retention))
    return wire.read(Retention, (yield from _call("SetRetention", request)).retention)


def get_gate(model: str) -> Steps[Gate]:
    """Which versions are held."""
    return wire.read(Gate, (yield from _call("GetGate", pb.GetGateRequest(model=model))).gate)


def set_gate(model: str, gate: Gate) -> Steps[Gate]:
    """Say which versions are held."""
    request = pb.SetGateRequest(model=model, gate=wire.write(resources_pb2.Gate, gate))
    return wire.read(Gate, (yield from _call("SetGate", request)).gate)


def delete_model(model: str, *, force: bool = False) -> Steps[DeletedModel]:
    """Take a model away; with ``force``, also if adapters are on versions of it."""
    request = pb.DeleteModelRequest(model=model, request_id=str(uuid.uuid4()), force=force)
    response = yield from _call("DeleteModel", request, _LONG_SECONDS)
    return DeletedModel(model, response.versions)


def collect(model: str, *, dry_run: bool) -> Steps[Collection]:
    """Delete what need not be kept."""
    request = pb.CollectVersionsRequest(model=model, dry_run=dry_run)
    response = yield from _call("CollectVersions", request, _LONG_SECONDS)
    return wire.read(Collection, response.collection)


def warm(model: str) -> Steps[WarmMemory]:
    """Have the service make memory for a model's next versions."""
    response = yield from _call("WarmModel", pb.WarmModelRequest(model=model), _LONG_SECONDS)
    return wire.read(WarmMemory, response.memory)


def get_usage() -> Steps[Usage]:
    """Limits, and how much of them is used."""
    return wire.read(Usage, (yield from _call("GetUsage", pb.GetUsageRequest())))
