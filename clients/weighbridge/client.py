"""What trainers, engines and people alike ask the service: models, versions, refs."""

from __future__ import annotations

import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import PurePath
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from weighbridge import bulk, rpc, wire
from weighbridge.collection import Collection
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)
from weighbridge.layouts import TensorSpec
from weighbridge.local_lane import LocalLane, lane_wanted
from weighbridge.resources import Model, Retention, Verification, Version, VersionState
from weighbridge.striping import default_connections
from weighbridge.v1 import (
    local_lane_pb2,
    local_lane_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    resources_pb2,
)

T = TypeVar("T")
_LONG_SECONDS = 3600.0
"""Deadline of calls that go over all of a version or a model."""
_WAIT_SECONDS = 20.0
"""How long one call waits for a state before it is made again."""
_PAUSE_SECONDS = 0.1
_LANE_SECONDS = 5.0
_WATCH_PAUSE_SECONDS = 0.5
"""Longest pause of a watch between tries: engines are waiting for news."""


def _called(method: weakref.WeakMethod[Callable[[], T]]) -> T:
    there = method()
    if there is None:
        raise Unavailable("the client has been closed")
    return there()


class Client:
    """Connections to the service. Connects when first used; safe to use from several threads, and after a fork only
    if it was not used before.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds: how long to keep trying when the service cannot be reached, or has no room.
        lane: how weights travel: ``local`` by memory that is shared with the service, ``grpc`` by its gRPC face, ``auto`` by the
            first if this process runs on the service's machine and by the second otherwise. By default ``WEIGHBRIDGE_LANE``, or
            ``auto``.
        connections: over how many connections a stream of 64 MiB or more is spread, 1 to 16; by default two, or one on a
            machine with fewer than four processors. All other calls have a connection of their own.

    Raises:
        InvalidArgument: there is no such lane, or there cannot be so many connections.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        retry_seconds: float = 60.0,
        lane: str | None = None,
        connections: int | None = None,
    ) -> None:
        self.server = rpc.server_address(server)
        self.retry_seconds = retry_seconds
        self._client_id = str(uuid.uuid4())
        # its threads would keep a client that nobody has closed for ever
        find_lane = weakref.WeakMethod(self._find_lane)
        self._lane = LocalLane(lane_wanted(lane), self._client_id, lambda: _called(find_lane))
        weakref.finalize(self, self._lane.close).atexit = False
        self._bulk = bulk.Connections(
            self.server, default_connections() if connections is None else connections
        )

    @cached_property
    def _channel(self) -> grpc.Channel:
        return rpc.open_channel(self.server)

    @cached_property
    def _models(self) -> model_service_pb2_grpc.ModelServiceStub:
        return model_service_pb2_grpc.ModelServiceStub(self._channel)

    def _find_lane(self) -> local_lane_pb2.GetLocalLaneResponse:
        with rpc.translated_errors(self.server):
            stub = local_lane_pb2_grpc.LocalLaneServiceStub(self._channel)
            return stub.GetLocalLane(local_lane_pb2.GetLocalLaneRequest(), timeout=_LANE_SECONDS)

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are gone."""
        self._lane.close()
        self._bulk.close()
        if "_channel" in self.__dict__:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., T], request: Any, *, seconds: float = rpc.CALL_SECONDS) -> T:
        """Make one call that is safe to repeat."""

        def once() -> T:
            with rpc.translated_errors(self.server):
                return method(request, timeout=seconds)

        return rpc.retried(once, seconds=self.retry_seconds)

    def register_files(
        self,
        model: str,
        files: Mapping[str, bytes],
        dtype: str = "",
        tensors: Iterable[TensorSpec] = (),
    ) -> Model:
        """Register a model by the content of its files, ``config.json`` among them. Repeating it is harmless.

        Args:
            model: ``namespace/name``.
            files: content of the files besides the weights, by name.
            dtype: of the weights; by default what ``tensors`` says, or else ``config.json``.
            tensors: the tensors in its files of weights, if there are such files.

        Raises:
            InvalidArgument: its model type has no weight map, or a name or a file is wrong.
            FailedPrecondition: the model is registered already, with other tensors.
        """
        size = sum(map(len, files.values()))
        if size > rpc.MAX_MESSAGE_BYTES - (1 << 20):
            raise InvalidArgument(
                f"the files besides the weights have {size} bytes together, more than 63 MiB"
            )
        messages = [resources_pb2.ModelFile(name=name, content=content) for name, content in files.items()]
        request = model_service_pb2.RegisterModelRequest(
            model=model,
            files=messages,
            dtype=dtype,
            request_id=str(uuid.uuid4()),
            tensors=map(wire.spec_to_proto, tensors),
        )
        return wire.model_from_proto(self._call(self._models.RegisterModel, request).model)

    def model(self, model: str) -> Model:
        """One model. Raises NotFound."""
        return wire.model_from_proto(
            self._call(self._models.GetModel, model_service_pb2.GetModelRequest(model=model)).model
        )

    def models(self) -> list[Model]:
        """All models, by name."""
        found: list[Model] = []
        token = ""
        while True:
            request = model_service_pb2.ListModelsRequest(page_token=token)
            page = self._call(self._models.ListModels, request)
            found += map(wire.model_from_proto, page.models)
            token = page.next_page_token
            if not token:
                return found

    def model_files(self, model: str, version: str | int = "") -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now if no version is named.

        Raises:
            NotFound: no such model or version.
            DataLoss: a name is none that a file in the model's own folder can have.
        """
        request = model_service_pb2.GetModelFilesRequest(model=model, version=str(version))
        files = self._call(self._models.GetModelFiles, request).files
        for file in files:
            if file.name in ("", ".", "..") or PurePath(file.name).name != file.name:
                raise DataLoss(f"the service says that {model} has a file {file.name[:200]!r}")
        return {file.name: file.content for file in files}

    def version(self, model: str, version: str | int = "latest") -> Version:
        """One version, by number or ref. Raises NotFound."""
        request = model_service_pb2.GetVersionRequest(model=model, version=str(version))
        return wire.version_from_proto(self._call(self._models.GetVersion, request).version)

    def wait_for(
        self,
        model: str,
        version: str | int,
        state: VersionState,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Version], None] | None = None,
    ) -> Version:
        """Wait until a version has reached a state.

        Args:
            model: which model.
            version: which version.
            state: OPEN, RECEIVING, READY, VERIFIED or DURABLE.
            timeout: seconds; None waits as long as it takes.
            on_progress: is called with the version as it stands now and then.

        Raises:
            VersionFailed: it failed, or could not be made durable.
            DeadlineExceeded: not in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        looked = False
        while True:
            left = _WAIT_SECONDS if deadline is None else min(_WAIT_SECONDS, deadline - time.monotonic())
            if left <= 0 and looked:
                raise DeadlineExceeded(f"{model}@{version} was not {state.value} within {timeout} s")
            left, looked = max(left, 1.0), True
            if on_progress is not None:
                left = min(left, 0.5)
            request = model_service_pb2.GetVersionRequest(
                model=model, version=str(version), wait_for=wire.state_to_proto(state)
            )
            try:
                found = wire.version_from_proto(
                    self._call(self._models.GetVersion, request, seconds=left).version
                )
            except DeadlineExceeded:
                if on_progress is not None:
                    on_progress(self.version(model, version))
                time.sleep(_PAUSE_SECONDS)  # the service may be too busy to let this call wait
                continue
            if on_progress is not None:
                on_progress(found)
            return found

    def versions(self, model: str, *, include_invisible: bool = False) -> list[Version]:
        """A model's versions, newest first.

        Args:
            model: which model.
            include_invisible: also those still being received, and those that failed since the service started.
        """
        found: list[Version] = []
        token = ""
        while True:
            request = model_service_pb2.ListVersionsRequest(
                model=model, page_token=token, include_invisible=include_invisible
            )
            page = self._call(self._models.ListVersions, request)
            found += map(wire.version_from_proto, page.versions)
            token = page.next_page_token
            if not token:
                return found

    def watch(self, model: str, ref: str = "live") -> Iterator[Version]:
        """The version a ref names now, then each one it moves to, for ever. Reconnects when the service comes back.

        A version that is replaced before it could be sent may be left out; the newest never is.

        Raises:
            NotFound: the model is not registered.
            Unavailable, ResourceExhausted: the service could not be reached, or had no place for another watch, within
                `retry_seconds` from the start.
        """
        last = 0
        patience = rpc.Patience(self.retry_seconds, _WATCH_PAUSE_SECONDS)
        while True:
            call: Any = None
            failure: WeighbridgeError = Unavailable(f"the service at {self.server} is shutting down")
            try:
                with rpc.translated_errors(self.server):
                    call = self._models.WatchRef(
                        model_service_pb2.WatchRefRequest(model=model, ref=ref, after=last)
                    )
                    for response in call:
                        patience = rpc.Patience(math.inf, _WATCH_PAUSE_SECONDS)
                        last = response.version.number
                        yield wire.version_from_proto(response.version)
            except ValueError as error:  # grpc's word for a channel that was closed meanwhile
                raise Unavailable("the client has been closed") from error
            except (Unavailable, ResourceExhausted) as error:
                failure = error
            finally:
                if call is not None:
                    call.cancel()
            if not patience.wait():
                raise failure

    def refs(self, model: str) -> dict[str, int]:
        """Version number by ref."""
        return dict(self._call(self._models.ListRefs, model_service_pb2.ListRefsRequest(model=model)).refs)

    def set_ref(self, model: str, ref: str, version: str | int) -> Version:
        """Let a tag name a version in the object store."""
        request = model_service_pb2.SetRefRequest(model=model, ref=ref, version=str(version))
        return wire.version_from_proto(self._call(self._models.SetRef, request).version)

    def delete_ref(self, model: str, ref: str) -> None:
        """Take a tag away. Raises NotFound."""
        self._call(self._models.DeleteRef, model_service_pb2.DeleteRefRequest(model=model, ref=ref))

    def verify(self, model: str, version: str | int = "latest") -> Verification:
        """Compare a version's files in the object store with the digests in its manifest."""
        request = model_service_pb2.VerifyVersionRequest(model=model, version=str(version))
        found = self._call(self._models.VerifyVersion, request, seconds=_LONG_SECONDS)
        return Verification(found.number, found.tensors_checked, found.bytes_checked, tuple(found.problems))

    def retention(self, model: str) -> Retention:
        """Which versions of a model are kept. Raises NotFound."""
        request = model_service_pb2.GetRetentionRequest(model=model)
        return wire.retention_from_proto(self._call(self._models.GetRetention, request).retention)

    def set_retention(self, model: str, retention: Retention) -> Retention:
        """Say which versions of a model are kept, instead of what was said before.

        The others are deleted by the next collection; they can be read for a grace time after that. ``Retention()`` keeps
        everything.

        Raises:
            NotFound: the model is not registered.
        """
        request = model_service_pb2.SetRetentionRequest(
            model=model, retention=wire.retention_to_proto(retention)
        )
        return wire.retention_from_proto(self._call(self._models.SetRetention, request).retention)

    def delete_version(self, model: str, number: int) -> Version:
        """Take a version out of history, whatever the retention says; it can be read by its number for a grace time.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: a ref names it, as ``latest`` does the newest one, or it is not durable yet.
        """
        if not 0 < number < 1 << 64:
            raise InvalidArgument(f"{number} is no version number")
        request = model_service_pb2.DeleteVersionRequest(model=model, number=number)
        return wire.version_from_proto(self._call(self._models.DeleteVersion, request).version)

    def collect(self, model: str, *, dry_run: bool = False) -> Collection:
        """Delete what need not be kept of a model now; services do so by themselves now and then.

        Args:
            model: which model.
            dry_run: only say what would be done.

        Raises:
            NotFound: the model is not registered.
        """
        request = model_service_pb2.CollectVersionsRequest(model=model, dry_run=dry_run)
        found = self._call(self._models.CollectVersions, request, seconds=_LONG_SECONDS)
        return wire.collection_from_proto(found.collection)
