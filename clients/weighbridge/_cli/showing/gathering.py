"""Readings of a service for an overview: over gRPC, information that every client may see; over HTTP, memory use, if
this client may observe it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from weighbridge._cli.doctor import asking
from weighbridge._cli.showing.overview import MemoryUse, Place, ServiceState, unfinished
from weighbridge._clients.calls import engine_calls, version_calls
from weighbridge._clients.calls.operation_calls import ask, ask_all
from weighbridge._clients.connection import Connection
from weighbridge._core.engines.facts import Engine
from weighbridge._core.operations import table
from weighbridge._core.references import training_of
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import Model, Version
from weighbridge.errors import DeadlineExceeded, ResourceExhausted, Unavailable, WeighbridgeError

T = TypeVar("T")
AWAY = (Unavailable, DeadlineExceeded, ResourceExhausted)
"""Errors of a service that is unreachable or too busy; the request is retried."""
_NEWEST = 12
"""Number of versions that are read per model."""
_AT_ONCE = 8
"""Number of concurrent requests to a service."""
_HTTP_SECONDS = 2.0
_ASK_HTTP_AGAIN_SECONDS = 30.0
"""Time after which an unresponsive HTTP address is tried again."""


class Gatherer:
    """Reads one service repeatedly.

    Args:
        server: its gRPC address, or those of its replicas.
        http: its HTTP address; None for the one that the service reports.
        models: only these; all if empty.
    """

    def __init__(self, server: str, http: str | None, models: Sequence[str]) -> None:
        self.server = server
        self._connection = Connection(server, retry_seconds=0.0, lane="grpc")
        self._http = http
        self._ask_http_at = 0.0
        self._models = tuple(models)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weighbridge-top")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    def read(self) -> ServiceState:
        """Read it now.

        Raises:
            Unavailable: the service is unreachable.
            WeighbridgeError: a required request failed.
        """
        run = self._connection.run
        if self._models:
            asked = [ask(table.GET_MODEL, model=name) for name in map(_weights_of, self._models)]
            models = list(self._pool.map(run, asked))
        else:
            models = run(ask_all(table.LIST_MODELS))
        names = [name for model in models for name in (model.name, training_of(model.name))]
        versions = [version for found in self._pool.map(self._versions, names) for version in found]
        return ServiceState(
            at_s=time.monotonic(),
            time_ms=int(time.time() * 1000),
            models=tuple(models),
            versions=tuple(versions),
            ranks=self._ranks(unfinished(versions)),
            engines=self._engines(models),
            memory=self._memory(),
        )

    def _versions(self, model: str) -> list[Version]:
        """Newest versions of a model; empty for one without training states, or one that was deleted meanwhile."""
        listing = version_calls.list_versions(model, include_invisible=True, limit=_NEWEST)
        return self._perhaps(lambda: self._connection.run(listing)) or []

    def _ranks(self, versions: Sequence[Version]) -> dict[Place, tuple[RankProgress, ...]]:
        """Progress of each rank, by version; versions that were deleted meanwhile are left out."""

        def of(version: Version) -> list[RankProgress] | None:
            asked = version_calls.rank_progress(version.model, version.number)
            return self._perhaps(lambda: self._connection.run(asked))

        found = zip(versions, self._pool.map(of, versions), strict=True)
        return {(version.model, version.number): tuple(ranks) for version, ranks in found if ranks}

    def _engines(self, models: Sequence[Model]) -> tuple[Engine, ...]:
        names = {model.name for model in models}
        listed = self._perhaps(lambda: self._connection.run(engine_calls.list_engines(None))) or []
        return tuple(engine for engine in listed if engine.model in names)

    def _memory(self) -> MemoryUse | None:
        """Memory use; None if the service does not report its HTTP address, or does not permit this client to read
        it.
        """
        if time.monotonic() < self._ask_http_at:
            return None
        connection = self._connection
        try:
            address = self._http or asking.told_address(connection.addresses.current, connection.credentials)
            return memory_of(asking.ask(address, "/v1/memory", _HTTP_SECONDS, connection.credentials).value)
        except WeighbridgeError:
            self._ask_http_at = time.monotonic() + _ASK_HTTP_AGAIN_SECONDS
            return None

    def _perhaps(self, question: Callable[[], T]) -> T | None:
        """The response to a request that the service's policy may refuse."""
        try:
            return question()
        except AWAY:
            raise
        except WeighbridgeError:
            return None


def memory_of(answer: Any) -> MemoryUse:
    """Parse the response of ``/v1/memory``. Raises Unavailable if it does not come from a service."""
    try:
        return MemoryUse(
            images=int(answer["memory"]["in_use"]),
            budget=int(answer["budget"]),
            disk=int(answer["disk"]["in_use"]),
            in_flight={str(way): int(count) for way, count in answer["in_flight"].items()},
            byte_budget=int(answer["byte_budget"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable("what answers at /v1/memory is not a service") from error


def _weights_of(model: str) -> str:
    return model.removesuffix(":training")
