"""Calls about models: registration, files, deletion."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.calls.steps import Steps, call_method
from weighbridge._core import dtypes
from weighbridge._core.file_names import is_file_name
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.operations.operation import LONG_SECONDS
from weighbridge._core.references import Reference
from weighbridge._core.resources import DeletedModel, Model
from weighbridge._transport import wire
from weighbridge._transport.request_parts import MAX_REQUEST_BYTES
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2

if TYPE_CHECKING:
    import torch

_REGISTERING_SECONDS = 660.0
"""Deadline of a registration. It is longer than the time that a service gives its process for two weight maps, of which
the first waits for imports.
"""

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["ModelService"])


def registration(
    model: str,
    files: Mapping[str, bytes],
    dtype: str | torch.dtype = "",
    tensors: Iterable[TensorSpec] = (),
    *,
    weight_map: bool = True,
    base: str = "",
) -> pb.RegisterModelRequest:
    """Return the request that registers a model by the content of its files, for `register_model`. Raises
    InvalidArgument if the files are too large.

    Args:
        model, files, dtype, tensors, weight_map: as for `Client.register_files`.
        base: for an adapter, the version on which it is based. The adapter is registered only if it fits that version.
    """
    size = sum(map(len, files.values()))
    if size > MAX_REQUEST_BYTES - (1 << 20):
        raise InvalidArgument(f"the files besides the weights have {size} bytes together, more than 63 MiB")
    return pb.RegisterModelRequest(
        model=model,
        files=[resources_pb2.ModelFile(name=name, content=content) for name, content in files.items()],
        dtype=dtypes.parse(dtype).short if dtype else "",
        request_id=str(uuid.uuid4()),
        tensors=map(wire.spec_to_proto, tensors),
        no_weight_map=not weight_map,
        base=base,
    )


def register_model(request: pb.RegisterModelRequest) -> Steps[Model]:
    """Register a model."""
    return wire.read(Model, (yield from _call("RegisterModel", request, _REGISTERING_SECONDS)).model)


def model_files(model: str, version: str | int | None) -> Steps[dict[str, bytes]]:
    """Return the files other than the weights. Refuses names that would lead out of the model's folder."""
    meant = Reference.of(model, version)
    request = pb.GetModelFilesRequest(model=meant.model, version=meant.version)
    files = (yield from _call("GetModelFiles", request)).files
    for file in files:
        if not is_file_name(file.name):
            raise DataLoss(f"the service sent a file of {meant.model} whose name is not valid: {file.name[:200]!r}")
    return {file.name: file.content for file in files}


def delete_model(model: str, *, force: bool = False) -> Steps[DeletedModel]:
    """Delete a model; with ``force``, even if adapters are based on its versions."""
    request = pb.DeleteModelRequest(model=model, request_id=str(uuid.uuid4()), force=force)
    response = yield from _call("DeleteModel", request, LONG_SECONDS)
    return DeletedModel(model, response.versions)
