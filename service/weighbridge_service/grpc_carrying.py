"""Which methods carry weights, and so are put on the wire and taken off it by `weighbridge.pieces`."""

from __future__ import annotations

from typing import Any

import grpc

from weighbridge.pieces import decoder
from weighbridge.v1 import checkpoint_service_pb2

_REQUESTS = {"/weighbridge.v1.CheckpointService/Push": decoder(checkpoint_service_pb2.PushRequest)}
_RESPONSES = (
    "/weighbridge.v1.CheckpointService/Restore",
    "/weighbridge.v1.ReplicaService/ReadFile",
    "/weighbridge.v1.WeightService/Pull",
)


class CarryingInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Gives `Push` its messages as `Carried`, and lets `Restore`, `ReadFile` and `Pull` yield messages that are encoded already."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Change how the method's messages are coded."""
        handler = continuation(details)
        if details.method in _REQUESTS:
            return handler._replace(request_deserializer=_REQUESTS[details.method])
        if details.method in _RESPONSES:
            serialise = handler.response_serializer
            return handler._replace(
                response_serializer=lambda each: each if isinstance(each, bytes) else serialise(each)
            )
        return handler
