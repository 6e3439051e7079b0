"""Handlers of gRPC's own services: health checks and reflection.

They return the same responses as the handlers in grpcio's packages, but their requests are subject to the same limits
as all other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from weighbridge.errors import NotFound
from weighbridge_service.api.grpc.call import Call

HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_Status = health_pb2.HealthCheckResponse


def reflection_handlers(names: Iterable[str]) -> object:
    """Handlers of `ServerReflection` for these services."""
    return ReflectionServicer(names)


class HealthHandlers:
    """`Health`: whether the service accepts new work.

    Use it in the loop's thread, except `serve`, which is called before the loop serves calls.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._status = _Status.SERVING
        self._refused = asyncio.Event()

    def serve(self, names: Iterable[str]) -> None:
        """Report these services as serving."""
        self._names = {"", *names}

    def refuse(self) -> None:
        """Report all services as not serving from now on."""
        self._status = _Status.NOT_SERVING
        self._refused.set()

    def _of(self, name: str) -> health_pb2.HealthCheckResponse:
        return _Status(status=self._status if name in self._names else _Status.SERVICE_UNKNOWN)

    async def Check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        """See gRPC's health checking protocol."""
        if request.service not in self._names:
            raise NotFound(f"there is no service {request.service[:80]!r} here")
        return self._of(request.service)

    async def List(self, request: Any, call: Call) -> Any:
        """See gRPC's health checking protocol; grpcio 1.76 does not know it yet."""
        return health_pb2.HealthListResponse(statuses={name: self._of(name) for name in self._names})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """See gRPC's health checking protocol."""
        if not self._refused.is_set():
            yield self._of(request.service)
            await self._refused.wait()
        yield self._of(request.service)
        await asyncio.get_running_loop().create_future()  # until the caller disconnects
