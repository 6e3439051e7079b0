"""What an engine's agent does on an event loop: hear of new versions, and pull slices of them."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from weighbridge import control_calls, rpc, wire
from weighbridge.aio.pulls import AsyncPull, Carrier
from weighbridge.backoff import Backoff
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError
from weighbridge.known_layouts import KnownLayouts
from weighbridge.resources import Model, Version, VersionState
from weighbridge.slices import LayoutRequest
from weighbridge.transport import Transport
from weighbridge.v1 import model_service_pb2_grpc

T = TypeVar("T")


class AsyncEngineClient:
    """The asyncio twin of `weighbridge.EngineClient`; one for each rank. Belongs to the event loop that it is first used on.

    Every method may be cancelled, so ``asyncio.timeout`` sets a deadline for any of them. Errors are those of `weighbridge.errors`.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds, lane, connections: as for `weighbridge.client.Client`.

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
        self._calls: set[Any] = set()
        self._layouts = KnownLayouts()
        self._carrier = Carrier(
            Transport.make(
                self.server,
                str(uuid.uuid4()),
                retry_seconds=retry_seconds,
                lane=lane,
                connections=connections,
            )
        )

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._closed:
            raise Unavailable("the client has been closed")
        return self._connected

    @cached_property
    def _connected(self) -> grpc.aio.Channel:
        # made when first used: it belongs to the event loop that runs then
        return grpc.aio.insecure_channel(self.server, options=rpc.CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Close all connections: what is under way fails. Tensors that are views of a version stay valid until they are gone."""
        if self._closed:
            return
        self._closed = True
        for call in list(self._calls):  # the channel does not see to those that are being read
            call.cancel()
        await self._carrier.close()
        if "_connected" in self.__dict__:
            await self._connected.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def model(self, model: str) -> Model:
        """One model. Raises NotFound."""
        return await self._run(control_calls.get_model(model))

    async def models(self) -> list[Model]:
        """All models, by name."""
        return await self._run(control_calls.list_models())

    async def model_files(self, model: str, version: str | int = "") -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now if no version is named.

        Raises:
            NotFound: no such model or version.
        """
        return await self._run(control_calls.model_files(model, version))

    async def version(self, model: str, version: str | int = "latest") -> Version:
        """One version, by number or ref. Raises NotFound."""
        return await self._run(control_calls.get_version(model, version))

    async def wait_for(
        self,
        model: str,
        version: str | int,
        state: VersionState,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # as the blocking client has it, with its error
        on_progress: Callable[[Version], None] | None = None,
    ) -> Version:
        """Wait until a version has reached a state.

        Args:
            model: which model.
            version: which version.
            state: READY, VERIFIED or DURABLE.
            timeout: seconds; None waits as long as it takes.
            on_progress: is called with the version as it stands now and then.

        Raises:
            VersionFailed: it failed, or could not be made durable.
            DeadlineExceeded: not in time.
        """
        return await self._run(control_calls.wait_for(model, version, state, timeout, on_progress))

    async def versions(self, model: str, *, include_invisible: bool = False) -> list[Version]:
        """A model's versions, newest first.

        Args:
            model: which model.
            include_invisible: also those still being received, and those that have failed lately.
        """
        return await self._run(control_calls.list_versions(model, include_invisible=include_invisible))

    async def refs(self, model: str) -> dict[str, int]:
        """Version number by ref."""
        return await self._run(control_calls.list_refs(model))

    async def set_ref(self, model: str, ref: str, version: str | int) -> Version:
        """Let a tag name a version in the object store."""
        return await self._run(control_calls.set_ref(model, ref, version))

    async def delete_ref(self, model: str, ref: str) -> None:
        """Take a tag away. Raises NotFound."""
        await self._run(control_calls.delete_ref(model, ref))

    async def watch(self, model: str, ref: str = "live") -> AsyncGenerator[Version, None]:
        """The version a ref names now, then each one it moves to, for ever. Reconnects when the service comes back.

        A version that is replaced before it could be sent may be left out; the newest never is.

        Raises:
            NotFound: the model is not registered.
            Unavailable, ResourceExhausted: the service could not be reached, or had no place for another watch, within
                `retry_seconds` from the start.
        """
        async with aclosing(self.watch_refs([(model, ref)])) as found:
            async for _, version in found:
                yield version

    async def watch_refs(self, refs: Iterable[tuple[str, str]]) -> AsyncGenerator[tuple[str, Version], None]:
        """As `watch`, for several refs, also of several models, over one stream.

        Args:
            refs: model and ref of each.

        Yields:
            The ref, and the version that it names; which model's it is says the version.
        """
        watch = control_calls.Watch.begin(refs, self.retry_seconds)
        while True:
            failure: WeighbridgeError = Unavailable(f"the service at {self.server} is shutting down")
            try:
                models = model_service_pb2_grpc.ModelServiceStub(self._channel)
                with self._begun(models.WatchRefs, watch.request) as responses:
                    async for response in responses:
                        watch = watch.received(response.index, response.version.number)
                        yield watch.refs[response.index][1], wire.version_from_proto(response.version)
            except (Unavailable, ResourceExhausted) as error:
                failure = error
            again = None if self._closed else watch.failed(time.monotonic(), random.random())
            if again is None:
                raise failure
            pause, watch = again
            await asyncio.sleep(pause)

    def pull(
        self,
        model: str,
        version: str | int = "latest",
        layout: LayoutRequest | None = None,
        *,
        dtype: str | None = None,
    ) -> AsyncPull:
        """Pull slices of a version; only their bytes come over the wire. Nothing happens before something of it is awaited.

        Args:
            model: ``namespace/name``.
            version: a number or a ref.
            layout: `FullTensors` (the default), `TensorParallel` or `Boxes`.
            dtype: the service casts floating-point tensors to it before it sends them, such as ``bf16``; None keeps
                them as they are.

        Returns:
            ``async for name, tensor in client.pull(...)``; see there for more.
        """
        return AsyncPull(
            self._carrier,
            lambda: self._run(control_calls.plan_pull(self._layouts, model, version, layout, dtype)),
        )

    async def _run(self, steps: control_calls.Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._take(step)
                except WeighbridgeError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _take(self, step: control_calls.Step) -> Any:
        match step:
            case control_calls.Call():
                return await self._call(step)
            case control_calls.Pause(seconds):
                await asyncio.sleep(seconds)
            case control_calls.Work(do):
                return await self._carrier.threads.run_or_leave(do)
        return None

    async def _call(self, call: control_calls.Call) -> bytes:
        backoff = Backoff(self.retry_seconds)
        while True:
            try:
                method = rpc.in_parts(self._channel, call.path)
                with self._begun(method, call.request, call.seconds) as response:
                    return bytes(await response)
            except (Unavailable, ResourceExhausted) as error:
                retry = (
                    None if self._closed else backoff.after_error(error, time.monotonic(), random.random())
                )
                if retry is None:
                    raise
            backoff = retry.backoff
            await asyncio.sleep(retry.pause)

    @contextmanager
    def _begun(self, method: Callable[..., Any], request: Any, seconds: float | None = None) -> Iterator[Any]:
        """A call, cancelled in the end; raises the service's errors as it raised them."""
        call = method(request, timeout=seconds)
        self._calls.add(call)
        try:
            with rpc.translated_errors(self.server):
                yield call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the client has been closed") from None  # which cancels its calls
        finally:
            self._calls.discard(call)
            call.cancel()
