"""What trainers, engines and people alike ask the service: models, versions, refs."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from weighbridge import control_calls, rpc, wire
from weighbridge.collection import Collection
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError
from weighbridge.layouts import TensorSpec
from weighbridge.resources import Model, Retention, Verification, Version, VersionState, WarmMemory
from weighbridge.transport import Transport
from weighbridge.v1 import model_service_pb2_grpc

T = TypeVar("T")


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
        self._closed = False
        self._client_id = str(uuid.uuid4())
        self._transport = Transport.make(
            self.server,
            self._client_id,
            retry_seconds=retry_seconds,
            lane=lane,
            connections=connections,
        )

    @property
    def _channel(self) -> grpc.Channel:
        if self._closed:
            raise Unavailable("the client has been closed")
        return self._connected

    @cached_property
    def _connected(self) -> grpc.Channel:
        return rpc.open_channel(self.server)

    @cached_property
    def _models(self) -> model_service_pb2_grpc.ModelServiceStub:
        return model_service_pb2_grpc.ModelServiceStub(self._channel)

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are gone."""
        self._closed = True
        self._transport.close()
        if "_connected" in self.__dict__:
            self._connected.close()

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

        with self._ending_when_closed():
            return rpc.retried(once, self._channel, seconds=self.retry_seconds)

    @contextmanager
    def _ending_when_closed(self) -> Iterator[None]:
        """Raise Unavailable where grpc has its own word for a channel that was closed meanwhile."""
        try:
            yield
        except ValueError as error:
            if not self._closed:
                raise
            raise Unavailable("the client has been closed") from error

    def _run(self, steps: control_calls.Steps[T]) -> T:
        def call(step: control_calls.Call) -> bytes:
            method: Callable[..., bytes] = rpc.in_parts(self._channel, step.path)
            return self._call(method, step.request, seconds=step.seconds)

        return control_calls.run(steps, call)

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
        return self._run(control_calls.register_model(model, files, dtype, tensors))

    def model(self, model: str) -> Model:
        """One model. Raises NotFound."""
        return self._run(control_calls.get_model(model))

    def models(self) -> list[Model]:
        """All models, by name."""
        return self._run(control_calls.list_models())

    def model_files(self, model: str, version: str | int = "") -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now if no version is named.

        Raises:
            NotFound: no such model or version.
            DataLoss: a name is none that a file in the model's own folder can have.
        """
        return self._run(control_calls.model_files(model, version))

    def version(self, model: str, version: str | int = "latest") -> Version:
        """One version, by number or ref. Raises NotFound."""
        return self._run(control_calls.get_version(model, version))

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
        return self._run(control_calls.wait_for(model, version, state, timeout, on_progress))

    def versions(self, model: str, *, include_invisible: bool = False) -> list[Version]:
        """A model's versions, newest first.

        Args:
            model: which model.
            include_invisible: also those still being received, and those that have failed lately.
        """
        return self._run(control_calls.list_versions(model, include_invisible=include_invisible))

    def watch(self, model: str, ref: str = "live") -> Iterator[Version]:
        """The version a ref names now, then each one it moves to, for ever. Reconnects when the service comes back.

        A version that is replaced before it could be sent may be left out; the newest never is.

        Raises:
            NotFound: the model is not registered.
            Unavailable, ResourceExhausted: the service could not be reached, or had no place for another watch, within
                `retry_seconds` from the start.
        """
        for _, version in self.watch_refs([(model, ref)]):
            yield version

    def watch_refs(self, refs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Version]]:
        """As `watch`, for several refs, also of several models, over one stream.

        Args:
            refs: model and ref of each.

        Yields:
            The ref, and the version that it names; which model's it is says the version.
        """
        watch = control_calls.Watch.begin(refs, self.retry_seconds)
        while True:
            call: Any = None
            failure: WeighbridgeError = Unavailable(f"the service at {self.server} is shutting down")
            with self._ending_when_closed():
                try:
                    with rpc.translated_errors(self.server):
                        call = self._models.WatchRefs(watch.request)
                        for response in call:
                            watch = watch.received(response.index, response.version.number)
                            yield watch.refs[response.index][1], wire.version_from_proto(response.version)
                except (Unavailable, ResourceExhausted) as error:
                    failure = error
                finally:
                    if call is not None:
                        call.cancel()
            again = watch.failed(time.monotonic(), random.random())
            if again is None:
                raise failure
            pause, watch = again
            time.sleep(pause)

    def refs(self, model: str) -> dict[str, int]:
        """Version number by ref."""
        return self._run(control_calls.list_refs(model))

    def set_ref(self, model: str, ref: str, version: str | int) -> Version:
        """Let a tag name a version in the object store."""
        return self._run(control_calls.set_ref(model, ref, version))

    def delete_ref(self, model: str, ref: str) -> None:
        """Take a tag away. Raises NotFound."""
        self._run(control_calls.delete_ref(model, ref))

    def verify(self, model: str, version: str | int = "latest") -> Verification:
        """Compare a version's files in the object store with the digests in its manifest."""
        return self._run(control_calls.verify(model, version))

    def retention(self, model: str) -> Retention:
        """Which versions of a model are kept. Raises NotFound."""
        return self._run(control_calls.get_retention(model))

    def set_retention(self, model: str, retention: Retention) -> Retention:
        """Say which versions of a model are kept, instead of what was said before.

        The others are deleted by the next collection; they can be read for a grace time after that. ``Retention()`` keeps
        everything.

        Raises:
            NotFound: the model is not registered.
        """
        return self._run(control_calls.set_retention(model, retention))

    def delete_version(self, model: str, number: int) -> Version:
        """Take a version out of history, whatever the retention says; it can be read by its number for a grace time.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: a ref names it, as ``latest`` does the newest one, or it is not durable yet.
        """
        return self._run(control_calls.delete_version(model, number))

    def collect(self, model: str, *, dry_run: bool = False) -> Collection:
        """Delete what need not be kept of a model now; services do so by themselves now and then.

        Args:
            model: which model.
            dry_run: only say what would be done.

        Raises:
            NotFound: the model is not registered.
        """
        return self._run(control_calls.collect(model, dry_run=dry_run))

    def warm(self, model: str) -> WarmMemory:
        """Have the service make memory for a model's next versions now, so that the first push does not wait for it.

        It takes room that nobody has, within the service's budget, and holds nothing: another model that needs the room gets it.

        Args:
            model: which model.

        Raises:
            NotFound: the model is not registered.
        """
        return self._run(control_calls.warm(model))
