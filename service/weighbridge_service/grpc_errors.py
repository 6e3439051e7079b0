"""How errors cross the wire: as ``google.rpc`` status details with a reason, a fix, and the tensors concerned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)

_DOMAIN = "weighbridge.v1"
_MOST_DETAILS = 20
_LONGEST_DETAIL = 300
"""Status details travel in HTTP/2 headers, of which peers take 8 to 16 KiB."""


def to_status(error: WeighbridgeError) -> Any:
    """The error as a gRPC status."""
    details = {f"detail{i:03}": d[:_LONGEST_DETAIL] for i, d in enumerate(error.details[:_MOST_DETAILS])}
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=_DOMAIN, metadata={"fix": error.fix[:_LONGEST_DETAIL], **details}
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    return rpc_status.to_status(
        status_pb2.Status(
            code=code_pb2.Code.Value(error.grpc_code), message=error.message[:2000], details=[packed]
        )
    )


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Turns what handlers raise into statuses, and counts calls.

    Args:
        count: is called with method and status code of each call that ends.
    """

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._count = count

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wrap the method's handler."""
        handler = continuation(details)
        if handler is None:
            return None
        method = details.method.rpartition("/")[2]

        def unary(behaviour: Any) -> Any:
            def call(request: Any, context: grpc.ServicerContext) -> Any:
                with _Watch(self._count, method, context):
                    return behaviour(request, context)

            return call

        def streaming(behaviour: Any) -> Any:
            def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
                with _Watch(self._count, method, context):
                    yield from behaviour(request, context)

            return call

        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **coders)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), **coders)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), **coders)
        return handler  # reflection is the one that streams both ways


class _Watch:
    def __init__(self, count: Callable[[str, str], None], method: str, context: grpc.ServicerContext) -> None:
        self._count, self._method, self._context = count, method, context

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self._count(self._method, "OK" if error is None else "CANCELLED")
            return
        if not self._context.is_active():
            self._count(self._method, "CANCELLED")
            return
        if isinstance(error, grpc.RpcError):  # the stream that was being read from broke
            self._count(self._method, "CANCELLED")
            return
        if not isinstance(error, WeighbridgeError):
            log.exception("%s failed", self._method, exc_info=error)
            error = WeighbridgeError(f"the service failed: {type(error).__name__}", fix="its log says more")
        self._count(self._method, error.grpc_code)
        self._context.abort_with_status(to_status(error))
