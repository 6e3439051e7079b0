"""Control calls of every client as steps without I/O: models, versions, refs, retention, and the plan of a pull."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from weighbridge._clients.known_layouts import KnownLayout, KnownLayouts, same_as
from weighbridge._clients.pulling import PullPlan
from weighbridge._clients.steps import Call, Pause, Steps, Work, call_method
from weighbridge._core import dtypes
from weighbridge._core.collection import Collection
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.metadata import all_hold, conditions
from weighbridge._core.references import Reference
from weighbridge._core.resources import (
    REF_LATEST,
    REQUEST_DELETE,
    REQUEST_DONE,
    REQUEST_MOVE,
    DeletedModel,
    Gate,
    Model,
    Protection,
    RefRequest,
    Retention,
    Verification,
    Version,
    VersionState,
    WarmMemory,
)
from weighbridge._core.slices import FullTensors, LayoutRequest
from weighbridge._core.text.waits import REMIND_SECONDS, Reminder
from weighbridge._core.usage import Usage
from weighbridge._transport import wire
from weighbridge._transport.backoff import Backoff
from weighbridge._transport.request_parts import MAX_REQUEST_BYTES, encoded_parts
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    WeighbridgeError,
)
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2, weight_service_pb2

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LONG_SECONDS = 3600.0
"""Deadline of calls that go over all of a version or a model."""
_REGISTERING_SECONDS = 660.0
"""Deadline of a registration: longer than a service gives the process that makes weight maps for two of them, whose first one waits for imports."""
_AWAITED = (
    *(VersionState.OPEN, VersionState.RECEIVING),
    *(VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE),
)
_PROGRESS_SECONDS = 0.5
"""How long one call waits for a state before it is made again, where progress is to be told."""
_PAUSE_SECONDS = 0.1
_WATCH_PAUSE_SECONDS = 0.5
"""Longest pause of a watch between tries: engines are waiting for news."""


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
    registered = wire.model_from_proto(
        (yield from _call("RegisterModel", request, _REGISTERING_SECONDS)).model
    )
    if registered.weight_map and not weight_map:
        raise FailedPrecondition(
            f"the service has registered {model} with a weight map: it cannot do without",
            fix="update the service to this client's version",
        )
    return registered


def get_model(model: str) -> Steps[Model]:
    """One model."""
    response = yield from _call("GetModel", pb.GetModelRequest(model=model))
    return wire.model_from_proto(response.model)


def list_models() -> Steps[list[Model]]:
    """All models, page by page."""
    found: list[Model] = []
    request = pb.ListModelsRequest()
    while True:
        page = yield from _call("ListModels", request)
        found += [wire.model_from_proto(each) for each in page.models]
        if not page.next_page_token:
            return found
        request = pb.ListModelsRequest(page_token=page.next_page_token)


def model_files(model: str, version: str | int | None) -> Steps[dict[str, bytes]]:
    """The files besides the weights; refuses names that would lead out of the model's folder."""
    meant = Reference.of(model, version)
    request = pb.GetModelFilesRequest(model=meant.model, version=meant.version)
    files = (yield from _call("GetModelFiles", request)).files
    for file in files:
        if file.name in ("", ".", "..") or PurePath(file.name).name != file.name:
            raise DataLoss(f"the service says that {meant.model} has a file {file.name[:200]!r}")
    return {file.name: file.content for file in files}


def get_version(model: str, version: str | int | None) -> Steps[Version]:
    """One version."""
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.GetVersionRequest(model=meant.model, version=meant.version)
    return wire.version_from_proto((yield from _call("GetVersion", request)).version)


def wait_for(
    model: str,
    version: str | int | None,
    state: VersionState,
    timeout: float | None,
    on_progress: Callable[[Version], None] | None,
) -> Steps[Version]:
    """Wait until a version has reached a state, in calls that the service lets wait."""
    if state not in _AWAITED:
        allowed = ", ".join(each.value for each in _AWAITED)
        raise InvalidArgument(
            f"a version cannot be waited for to be {getattr(state, 'value', state)}",
            fix=f"wait for {allowed}",
        )
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.GetVersionRequest(
        model=meant.model, version=meant.version, wait_for=wire.state_to_proto(state)
    )
    longest = REMIND_SECONDS if on_progress is None else _PROGRESS_SECONDS
    reminder = Reminder()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    said: list[str] | None = None  # why not, as of the last call; None before the first one
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and said is not None:
            raise DeadlineExceeded(
                f"{meant.model}@{meant.version} was not {state.value} within {timeout:g} s", details=said
            )
        said = []
        try:
            response = yield from _call("GetVersion", request, min(longest, max(left, 1.0)))
        except DeadlineExceeded as error:
            said = [error.message]
            waited = reminder.due()
            if on_progress is not None or waited is not None:
                found = yield from get_version(meant.model, meant.version)
                if on_progress is not None:
                    on_progress(found)
                if waited is not None and found.waits_for:
                    log.warning("%s: for %.0f s, waits for %s", found, waited, "; ".join(found.waits_for))
            yield Pause(_PAUSE_SECONDS)  # the service may be too busy to let this call wait
            continue
        found = wire.version_from_proto(response.version)
        if on_progress is not None:
            on_progress(found)
        return found


def list_versions(
    model: str, *, include_invisible: bool, where: Sequence[str] = (), limit: int | None = None
) -> Steps[list[Version]]:
    """A model's versions, page by page; as many as are wanted."""
    if limit is not None and limit < 1:
        raise InvalidArgument(f"{limit} versions cannot be listed", fix="ask for one at the least")
    wanted = conditions(where)
    found: list[Version] = []
    request = pb.ListVersionsRequest(
        model=model, include_invisible=include_invisible, where=where, page_size=limit or 0
    )
    while True:
        page = yield from _call("ListVersions", request)
        versions = map(wire.version_from_proto, page.versions)
        found += [
            version for version in versions if all_hold(wanted, version.metadata)
        ]  # older services send all
        if not page.next_page_token or (limit is not None and len(found) >= limit):
            return found[:limit]
        request.page_token = page.next_page_token


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
    response = yield from _call("SetRef", request)
    if response.HasField("request"):
        return wire.read(RefRequest, response.request)
    return RefRequest(meant.model, ref, REQUEST_MOVE, REQUEST_DONE, response.version.number)  # of before


def delete_ref(model: str, ref: str) -> Steps[None]:
    """Take a tag away; is refused if that takes approvals."""
    yield from _call("DeleteRef", pb.DeleteRefRequest(model=model, ref=ref))


def request_ref_deletion(model: str, ref: str, note: str, request_id: str) -> Steps[RefRequest]:
    """Take a tag away, or ask for it."""
    request = pb.DeleteRefRequest(model=model, ref=ref, request_id=request_id or uuid.uuid4().hex, note=note)
    response = yield from _call("DeleteRef", request)
    if response.HasField("request"):
        return wire.read(RefRequest, response.request)
    return RefRequest(model, ref, REQUEST_DELETE, REQUEST_DONE)  # of before


def approve_ref(model: str, ref: str, request_id: str, note: str) -> Steps[RefRequest]:
    """Approve a change of a ref that another identity has asked for."""
    request = pb.ApproveRefRequest(model=model, ref=ref, request_id=request_id, note=note)
    return wire.read(RefRequest, (yield from _call("ApproveRef", request)).request)


def withdraw_ref(model: str, ref: str, request_id: str) -> Steps[RefRequest]:
    """End a request without carrying it out."""
    request = pb.WithdrawRefRequest(model=model, ref=ref, request_id=request_id)
    return wire.read(RefRequest, (yield from _call("WithdrawRef", request)).request)


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
    return wire.read(RefRequest, (yield from _call("DeleteProtection", request)).request)


def verify(model: str, version: str | int | None, *, sha256: bool = False) -> Steps[Verification]:
    """Compare a version's files with its manifest."""
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.VerifyVersionRequest(model=meant.model, version=meant.version, sha256=sha256)
    return wire.read(Verification, (yield from _call("VerifyVersion", request, _LONG_SECONDS)))


def get_retention(model: str) -> Steps[Retention]:
    """Which versions are kept."""
    response = yield from _call("GetRetention", pb.GetRetentionRequest(model=model))
    return wire.read(Retention, response.retention)


def set_retention(model: str, retention: Retention) -> Steps[Retention]:
    """Say which versions are kept."""
    request = pb.SetRetentionRequest(model=model, retention=wire.retention_to_proto(retention))
    return wire.read(Retention, (yield from _call("SetRetention", request)).retention)


def get_gate(model: str) -> Steps[Gate]:
    """Which versions are held."""
    return wire.read(Gate, (yield from _call("GetGate", pb.GetGateRequest(model=model))).gate)


def set_gate(model: str, gate: Gate) -> Steps[Gate]:
    """Say which versions are held."""
    request = pb.SetGateRequest(model=model, gate=wire.gate_to_proto(gate))
    return wire.read(Gate, (yield from _call("SetGate", request)).gate)


def approve(model: str, version: str | int | None, *, by: str, note: str) -> Steps[Version]:
    """Hold a version no longer for the reasons for which it is held now, and for no others if the call has to be repeated."""
    meant = Reference.of(model, version)
    found = yield from get_version(meant.model, meant.number)
    if not found.held:
        return found
    request = pb.ApproveVersionRequest(
        model=meant.model, number=meant.number, by=by, note=note, reasons=found.held
    )
    return wire.version_from_proto((yield from _call("ApproveVersion", request)).version)


def delete_version(model: str, version: str | int | None) -> Steps[Version]:
    """Take a version out of history."""
    meant = Reference.of(model, version)
    request = pb.DeleteVersionRequest(model=meant.model, number=meant.number)
    return wire.version_from_proto((yield from _call("DeleteVersion", request)).version)


def delete_model(model: str) -> Steps[DeletedModel]:
    """Take a model away."""
    request = pb.DeleteModelRequest(model=model, request_id=str(uuid.uuid4()))
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


def plan_pull(
    layouts: KnownLayouts,
    model: str,
    version: str | int | None,
    layout: LayoutRequest | None,
    dtype: str | torch.dtype | None,
) -> Steps[PullPlan]:
    """Which version a pull would bring, and which slices: there may be a hundred thousand, which come once."""
    asked = layout or FullTensors()
    meant = Reference.of(model, version, REF_LATEST)
    request = weight_service_pb2.PlanPullRequest(
        model=meant.model, version=meant.version, dtype=dtypes.parse(dtype).short if dtype else ""
    )

    def encode() -> tuple[Hashable, KnownLayout | None, tuple[bytes, ...]]:
        try:
            request.layout.CopyFrom(wire.request_to_proto(asked))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"what is to be pulled is malformed: {error}",
                fix="ask for FullTensors, TensorParallel or Boxes",
            ) from error
        what = (meant.model, request.layout.SerializeToString(), request.dtype)
        known = layouts.find(what)
        if known is not None:
            request.known_layout = known.digest
        return what, known, encoded_parts(request)

    what, known, encoded = yield Work(encode)
    raw = yield Call("/weighbridge.v1.WeightService/PlanPull", encoded)

    def plan() -> PullPlan:
        found = weight_service_pb2.PlanPullResponse.FromString(raw)
        if found.HasField("layout"):
            slices = wire.layout_from_proto(found.layout)
            layouts.keep(what, found.layout_digest, slices)
        else:
            slices = same_as(known, found.layout_digest)
        return PullPlan(wire.version_from_proto(found.version), slices, asked, request.dtype)

    planned: PullPlan = yield Work(plan)
    return planned


@dataclass(frozen=True, slots=True)
class Watch:
    """Where a watch of refs stands.

    Attributes:
        refs: model and name of each.
        last: for each, the number of the version that came last; 0 if none has.
        backoff: of the tries to open it; once something has come, it is opened again for ever.
    """

    refs: tuple[tuple[str, str], ...]
    last: tuple[int, ...]
    backoff: Backoff

    @staticmethod
    def begin(refs: Iterable[tuple[str, str]], retry_seconds: float) -> Watch:
        """A watch to which nothing has come. Raises InvalidArgument if a ref is no pair of model and name."""
        found = tuple(refs)
        for ref in found:
            if [type(part) for part in ref] != [str, str]:
                raise InvalidArgument(
                    f"{ref!r} is no model with one of its refs",
                    fix='watch tuples such as ("acme/smol", "live")',
                )
        return Watch(found, (0,) * len(found), Backoff(retry_seconds, _WATCH_PAUSE_SECONDS))

    @property
    def call(self) -> tuple[str, bytes, Callable[[bytes], tuple[int, Version]]]:
        """What opens it from here on: path, request, and the meaning of a response: the ref's index, and the version it names."""
        there = zip(self.refs, self.last, strict=True)
        request = pb.WatchRefsRequest(
            refs=[pb.WatchedRef(model=model, ref=ref, after=last) for (model, ref), last in there]
        )
        return "/weighbridge.v1.ModelService/WatchRefs", request.SerializeToString(), _moved_ref

    def received(self, index: int, number: int) -> Watch:
        """After a version has come for the ref with this index."""
        last = (*self.last[:index], number, *self.last[index + 1 :])
        return replace(self, last=last, backoff=Backoff(math.inf, _WATCH_PAUSE_SECONDS))

    def failed(
        self, error: WeighbridgeError, *, closed: bool, now: float, jitter: float
    ) -> tuple[float, Watch]:
        """Seconds until it should be opened again, and the watch that is opened then.

        Args:
            error: what it ended with; is raised if it should not be opened again.
            closed: whether the client has been closed.
            now: seconds of the monotonic clock.
            jitter: from 0 to 1.
        """
        if isinstance(error, Unavailable) and not any(self.last):
            retry = self.backoff.after_error(error, now, jitter)
        else:  # what has been there will be there again
            retry = self.backoff.after_failure(now, jitter)
        if closed or retry is None:
            raise error
        return retry.pause, replace(self, backoff=retry.backoff)


def _moved_ref(raw: bytes) -> tuple[int, Version]:
    response = pb.WatchRefsResponse.FromString(raw)
    return response.index, wire.version_from_proto(response.version)
