"""Control calls as steps without I/O: what the service is asked, and what its answers mean.

Each function is a generator that returns the result. It yields a `Call` and is sent the response or thrown the error, yields a
`Pause`, or yields `Work` and is sent its result. `run` takes these steps in a thread that may block, `weighbridge.aio` on an event
loop, so requests, paging and waiting are written once. (httpx writes its authentication flows in this way.)
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from weighbridge import rpc, wire
from weighbridge.backoff import Backoff
from weighbridge.collection import Collection
from weighbridge.errors import DataLoss, DeadlineExceeded, InvalidArgument, WeighbridgeError
from weighbridge.known_layouts import KnownLayout, KnownLayouts, same_as
from weighbridge.layouts import TensorSpec
from weighbridge.pulling import PullPlan
from weighbridge.request_parts import MAX_REQUEST_BYTES, encoded_parts
from weighbridge.resources import Model, Retention, Verification, Version, VersionState, WarmMemory
from weighbridge.slices import FullTensors, LayoutRequest
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2, weight_service_pb2

T = TypeVar("T")

_MODELS = pb.DESCRIPTOR.services_by_name["ModelService"]
_LONG_SECONDS = 3600.0
"""Deadline of calls that go over all of a version or a model."""
_AWAITED = (
    *(VersionState.OPEN, VersionState.RECEIVING),
    *(VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE),
)
_WAIT_SECONDS = 20.0
"""How long one call waits for a state before it is made again."""
_PROGRESS_SECONDS = 0.5
"""The same, where progress is to be told."""
_PAUSE_SECONDS = 0.1
_WATCH_PAUSE_SECONDS = 0.5
"""Longest pause of a watch between tries: engines are waiting for news."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call with one response, safe to repeat.

    Attributes:
        path: of the method.
        request: the encoded request, in parts.
        seconds: its deadline.
    """

    path: str
    request: tuple[bytes, ...]
    seconds: float = rpc.CALL_SECONDS


@dataclass(frozen=True, slots=True)
class Pause:
    """Time to let pass, in seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic that takes milliseconds or more: longer than an event loop should be held up."""

    do: Callable[[], Any]


Step: TypeAlias = Call | Pause | Work
Steps: TypeAlias = Generator[Step, Any, T]


def run(steps: Steps[T], call: Callable[[Call], bytes]) -> T:
    """Take steps one after the other in this thread; their result.

    Args:
        steps: what is to be done.
        call: makes a call, and gives the serialised response.
    """
    try:
        step = next(steps)
        while True:
            try:
                answer = _take(step, call)
            except WeighbridgeError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _take(step: Step, call: Callable[[Call], bytes]) -> Any:
    match step:
        case Call():
            return call(step)
        case Pause(seconds):
            time.sleep(seconds)
        case Work(do):
            return do()
    return None


def _call(name: str, request: Message, seconds: float = rpc.CALL_SECONDS) -> Steps[Any]:
    """A method of the service for models."""
    raw = yield Call(f"/{_MODELS.full_name}/{name}", encoded_parts(request), seconds)
    return GetMessageClass(_MODELS.methods_by_name[name].output_type).FromString(raw)


def register_model(
    model: str, files: Mapping[str, bytes], dtype: str, tensors: Iterable[TensorSpec]
) -> Steps[Model]:
    """Register a model by the content of its files."""
    size = sum(map(len, files.values()))
    if size > MAX_REQUEST_BYTES - (1 << 20):
        raise InvalidArgument(f"the files besides the weights have {size} bytes together, more than 63 MiB")
    request = pb.RegisterModelRequest(
        model=model,
        files=[resources_pb2.ModelFile(name=name, content=content) for name, content in files.items()],
        dtype=dtype,
        request_id=str(uuid.uuid4()),
        tensors=map(wire.spec_to_proto, tensors),
    )
    return wire.model_from_proto((yield from _call("RegisterModel", request)).model)


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
        found += map(wire.model_from_proto, page.models)
        if not page.next_page_token:
            return found
        request = pb.ListModelsRequest(page_token=page.next_page_token)


def model_files(model: str, version: str | int) -> Steps[dict[str, bytes]]:
    """The files besides the weights; refuses names that would lead out of the model's folder."""
    request = pb.GetModelFilesRequest(model=model, version=str(version))
    files = (yield from _call("GetModelFiles", request)).files
    for file in files:
        if file.name in ("", ".", "..") or PurePath(file.name).name != file.name:
            raise DataLoss(f"the service says that {model} has a file {file.name[:200]!r}")
    return {file.name: file.content for file in files}


def get_version(model: str, version: str | int) -> Steps[Version]:
    """One version."""
    request = pb.GetVersionRequest(model=model, version=str(version))
    return wire.version_from_proto((yield from _call("GetVersion", request)).version)


def wait_for(
    model: str,
    version: str | int,
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
    request = pb.GetVersionRequest(model=model, version=str(version), wait_for=wire.state_to_proto(state))
    longest = _WAIT_SECONDS if on_progress is None else _PROGRESS_SECONDS
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    said: list[str] | None = None  # why not, as of the last call; None before the first one
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and said is not None:
            raise DeadlineExceeded(
                f"{model}@{version} was not {state.value} within {timeout:g} s", details=said
            )
        said = []
        try:
            response = yield from _call("GetVersion", request, min(longest, max(left, 1.0)))
        except DeadlineExceeded as error:
            said = [error.message]
            if on_progress is not None:
                on_progress((yield from get_version(model, version)))
            yield Pause(_PAUSE_SECONDS)  # the service may be too busy to let this call wait
            continue
        found = wire.version_from_proto(response.version)
        if on_progress is not None:
            on_progress(found)
        return found


def list_versions(model: str, *, include_invisible: bool) -> Steps[list[Version]]:
    """A model's versions, page by page."""
    found: list[Version] = []
    request = pb.ListVersionsRequest(model=model, include_invisible=include_invisible)
    while True:
        page = yield from _call("ListVersions", request)
        found += map(wire.version_from_proto, page.versions)
        if not page.next_page_token:
            return found
        request = pb.ListVersionsRequest(
            model=model, include_invisible=include_invisible, page_token=page.next_page_token
        )


def list_refs(model: str) -> Steps[dict[str, int]]:
    """Version number by ref."""
    return dict((yield from _call("ListRefs", pb.ListRefsRequest(model=model))).refs)


def set_ref(model: str, ref: str, version: str | int) -> Steps[Version]:
    """Let a tag name a version."""
    request = pb.SetRefRequest(model=model, ref=ref, version=str(version))
    return wire.version_from_proto((yield from _call("SetRef", request)).version)


def delete_ref(model: str, ref: str) -> Steps[None]:
    """Take a tag away."""
    yield from _call("DeleteRef", pb.DeleteRefRequest(model=model, ref=ref))


def verify(model: str, version: str | int) -> Steps[Verification]:
    """Compare a version's files with its manifest."""
    request = pb.VerifyVersionRequest(model=model, version=str(version))
    found = yield from _call("VerifyVersion", request, _LONG_SECONDS)
    return Verification(found.number, found.tensors_checked, found.bytes_checked, tuple(found.problems))


def get_retention(model: str) -> Steps[Retention]:
    """Which versions are kept."""
    response = yield from _call("GetRetention", pb.GetRetentionRequest(model=model))
    return wire.retention_from_proto(response.retention)


def set_retention(model: str, retention: Retention) -> Steps[Retention]:
    """Say which versions are kept."""
    request = pb.SetRetentionRequest(model=model, retention=wire.retention_to_proto(retention))
    return wire.retention_from_proto((yield from _call("SetRetention", request)).retention)


def delete_version(model: str, number: int) -> Steps[Version]:
    """Take a version out of history."""
    if not 0 < number < 1 << 64:
        raise InvalidArgument(f"{number} is no version number")
    request = pb.DeleteVersionRequest(model=model, number=number)
    return wire.version_from_proto((yield from _call("DeleteVersion", request)).version)


def collect(model: str, *, dry_run: bool) -> Steps[Collection]:
    """Delete what need not be kept."""
    request = pb.CollectVersionsRequest(model=model, dry_run=dry_run)
    response = yield from _call("CollectVersions", request, _LONG_SECONDS)
    return wire.collection_from_proto(response.collection)


def warm(model: str) -> Steps[WarmMemory]:
    """Have the service make memory for a model's next versions."""
    response = yield from _call("WarmModel", pb.WarmModelRequest(model=model), _LONG_SECONDS)
    found = response.memory
    return WarmMemory(found.model, found.images, found.wanted, found.image_bytes)


def plan_pull(
    layouts: KnownLayouts, model: str, version: str | int, layout: LayoutRequest | None, dtype: str | None
) -> Steps[PullPlan]:
    """Which version a pull would bring, and which slices: there may be a hundred thousand, which come once."""
    asked = layout or FullTensors()
    request = weight_service_pb2.PlanPullRequest(model=model, version=str(version))

    def encode() -> tuple[Hashable, KnownLayout | None, tuple[bytes, ...]]:
        try:
            request.dtype = dtype or ""
            request.layout.CopyFrom(wire.request_to_proto(asked))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"what is to be pulled is malformed: {error}",
                fix='ask for FullTensors, TensorParallel or Boxes, and name a dtype, such as "bf16"',
            ) from error
        what = (model, request.layout.SerializeToString(), request.dtype)
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
    def request(self) -> pb.WatchRefsRequest:
        """What opens it from here on."""
        there = zip(self.refs, self.last, strict=True)
        return pb.WatchRefsRequest(
            refs=[pb.WatchedRef(model=model, ref=ref, after=last) for (model, ref), last in there]
        )

    def received(self, index: int, number: int) -> Watch:
        """After a version has come for the ref with this index."""
        last = (*self.last[:index], number, *self.last[index + 1 :])
        return replace(self, last=last, backoff=Backoff(math.inf, _WATCH_PAUSE_SECONDS))

    def failed(self, now: float, jitter: float) -> tuple[float, Watch] | None:
        """Seconds until it should be opened again, and the watch that is opened then; None if it should not be."""
        retry = self.backoff.after_failure(now, jitter)
        return None if retry is None else (retry.pause, replace(self, backoff=retry.backoff))
