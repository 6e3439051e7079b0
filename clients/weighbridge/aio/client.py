"""Asyncio client of an engine's agent: it watches refs and pulls slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self, Unpack

from weighbridge._clients.calls import model_calls, pull_calls, version_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.calls.operation_calls import ask
from weighbridge._clients.calls.watching import Watch
from weighbridge._clients.transport import ConnectionOptions, Transport
from weighbridge._core.operations import table
from weighbridge._core.pauses import DICE
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LIVE, Model, Version, VersionState
from weighbridge._core.slices import LayoutRequest
from weighbridge._transport.outages import Outage
from weighbridge.aio.connection import AsyncConnection
from weighbridge.aio.operation_methods import AsyncOperationMethods
from weighbridge.aio.pulls import AsyncPull, Carrier
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError

if TYPE_CHECKING:
    import torch

__all__ = ["AsyncEngineClient"]


class AsyncEngineClient(AsyncOperationMethods):
    """Asyncio client of an engine; one for each rank.

    It has the methods of `weighbridge.EngineClient` that an agent needs.

    It belongs to the event loop on which it is first used.

    Every method may be cancelled, so ``asyncio.timeout`` can set a deadline for any of them. The methods raise the
    errors of `weighbridge.errors`.

    Args:
        server: ``host:port`` of the service's gRPC server, or several addresses, as for `weighbridge.Client`.
        options: as for `weighbridge.Client`.

    Raises:
        InvalidArgument: the lane does not exist, or the number of connections is out of range.

    Examples:
        >>> async with AsyncEngineClient(server) as client:
        ...     version = await anext(client.watch("acme/smol"))
        ...     weights = {name: tensor async for name, tensor in client.pull("acme/smol", version.number)}
        >>> len(weights), weights["model.norm.weight"][:3].tolist()
        (24, [0.5, 0.5, 0.5])
    """

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        transport = Transport(server, **options)
        self._layouts = KnownLayouts()
        self._carrier = Carrier(transport)
        self._connection = AsyncConnection(
            transport.addresses, transport.credentials, transport.retry_seconds, self._carrier.threads
        )

    def __repr__(self) -> str:
        closed = ", closed" if self._connection.closed else ""
        return f"<{type(self).__name__} of {self.server}{closed}>"

    @property
    def server(self) -> str:
        """Address of the service; several are separated by commas."""
        return str(self._connection.addresses)

    @property
    def retry_seconds(self) -> float:
        """Seconds for which a call is retried while the service is unreachable or has no capacity left."""
        return self._connection.retry_seconds

    async def close(self) -> None:
        """Close all connections. Calls in flight fail.

        Tensors that are views of a version stay valid until they are garbage-collected.
        """
        if self._connection.closed:
            return
        self._connection.stop()
        await self._carrier.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def model(self, model: str) -> Model:
        """Return a model. Raises NotFound."""
        return await self._connection.run(ask(table.GET_MODEL, model=model))

    async def model_files(self, model: str, version: str | int | None = None) -> dict[str, bytes]:
        """Return the files of a version other than its weights; the model's registered files if no version is named.

        Raises:
            NotFound: the model or version does not exist.
        """
        return await self._connection.run(model_calls.model_files(model, version))

    async def version(self, model: str, version: str | int | None = None) -> Version:
        """Return a version, by number or ref; by default the latest. Raises NotFound."""
        return await self._connection.run(version_calls.get_version(model, version))

    async def wait_for(
        self,
        model: str,
        version: str | int | None,
        state: VersionState,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # as the blocking client has it, with its error
        on_progress: Callable[[Version], None] | None = None,
    ) -> Version:
        """Wait until a version has reached a state, as `Client.wait_for` does."""
        return await self._connection.run(version_calls.wait_for(model, version, state, timeout, on_progress))

    async def versions(
        self,
        model: str,
        *,
        include_invisible: bool = False,
        where: Sequence[str] = (),
        limit: int | None = None,
    ) -> list[Version]:
        """Return a model's versions, newest first, as `Client.versions` does."""
        listing = version_calls.list_versions(model, include_invisible=include_invisible, where=where, limit=limit)
        return await self._connection.run(listing)

    async def refs(self, model: str) -> dict[str, int]:
        """Return the version number of each ref."""
        return dict((await self._connection.run(ask(table.LIST_REFS, model=model))).refs)

    async def approve(self, model: str, version: str | int | None = None, *, note: str = "", by: str = "") -> Version:
        """Approve a version, so that it is no longer held, as `Client.approve` does."""
        return await self._connection.run(version_calls.approve(model, version, by=by, note=note))

    async def watch(self, model: str, ref: str | None = None) -> AsyncGenerator[Version, None]:
        """Yield the version that a ref names now, then each version to which it moves, without end, as `Client.watch`
        does.

        Examples:
            >>> versions = client.watch("acme/smol", "latest")
            >>> print(await anext(versions))
            acme/smol@1 (durable, step 100)
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200)
            >>> print(await anext(versions))
            acme/smol@2 (durable, step 200)
        """
        meant = Reference.of(model, ref, REF_LIVE)
        async with aclosing(self.watch_refs([(meant.model, meant.version)])) as found:
            async for _, version in found:
                yield version

    async def watch_refs(self, refs: Iterable[tuple[str, str]]) -> AsyncGenerator[tuple[str, Version], None]:
        """Watch several refs over one stream, as `Client.watch_refs` does. They are given as pairs of model and ref."""
        watch, outage = Watch.begin(refs, self.retry_seconds), Outage(self.server)
        async with self._connection.reminding(lambda: watch.missing):
            while True:
                failure: WeighbridgeError = Unavailable(f"the service at {self.server} is shutting down")
                try:
                    async with aclosing(self._connection.responses(*watch.call)) as responses:
                        async for response in responses:
                            outage.over()
                            if response is None:
                                watch = watch.begun()
                                continue
                            index, version = response
                            watch = watch.received(index, version.number)
                            yield watch.refs[index][1], version
                except (Unavailable, ResourceExhausted) as error:
                    failure = error
                outage.failed(failure, watch.left(time.monotonic()))
                pause, watch = watch.failed(
                    failure, closed=self._connection.closed, now=time.monotonic(), jitter=DICE.random()
                )
                await asyncio.sleep(pause)

    def pull(
        self,
        model: str,
        version: str | int | None = None,
        layout: LayoutRequest | None = None,
        *,
        dtype: str | torch.dtype | None = None,
    ) -> AsyncPull:
        """Pull slices of a version. Only their bytes are transferred.

        The pull starts when the result is awaited or iterated over.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; by default the latest.
            layout: `FullTensors` (the default), `TensorParallel` or `Boxes`.
            dtype: dtype to which the service casts floating-point tensors before it sends them, such as ``bf16``; None
                does not cast.

        Returns:
            The pull, which yields ``(name, tensor)`` in ``async for name, tensor in client.pull(...)``; see
            `AsyncPull`.

        Examples:
            >>> async for name, tensor in client.pull("acme/smol", layout=FullTensors(("model.norm.weight",))):
            ...     print(name, tensor[:3].tolist())
            model.norm.weight [0.5, 0.5, 0.5]
        """
        planning = partial(pull_calls.plan_pull, self._layouts, model, version, layout, dtype)
        return AsyncPull(self._carrier, self._connection, planning)
