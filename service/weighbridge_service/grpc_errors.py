"""How errors cross the wire: as ``google.rpc`` status details with a reason, a fix, and the tensors concerned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from weighbridge.errors import InvalidArgument, ResourceExhausted, WeighbridgeError

log = logging.getLogger(__name__)

_DOMAIN = "weighbridge.v1"
_MOST_DETAILS = 20
_LONGEST_DETAIL = 300
_LONGEST_MESSAGE = 600
_MOST_BYTES = 2400
"""Bytes of all details together. Statuses travel in HTTP/2 headers, of which peers take 8 KiB for sure: the message
once percent-encoded (three bytes for each of a letter that is not ASCII), and everything once more in base64."""


def to_status(error: WeighbridgeError) -> Any:
    """The error as a gRPC status."""
    details: dict[str, str] = {}
    room = _MOST_BYTES
    for i, detail in enumerate(error.details[:_MOST_DETAILS]):
        text = _cut(detail, _LONGEST_DETAIL)
        room -= len(text.encode())
        if room < 0:
            break
        details[f"detail{i:03}"] = text
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=_DOMAIN, metadata={"fix": _cut(error.fix, _LONGEST_DETAIL), **details}
    )
    packed = [any_pb2.Any()]
    packed[0].Pack(info)
    if isinstance(error, ResourceExhausted) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after * 1000))
        packed.append(any_pb2.Any())
        packed[1].Pack(retry)
    return rpc_status.to_status(
        status_pb2.Status(
            code=code_pb2.Code.Value(error.grpc_code),
            message=_cut(error.message, _LONGEST_MESSAGE),
            details=packed,
        )
    )


def _cut(text: str, most: int) -> str:
    """The text's beginning, in at most so many bytes of UTF-8."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


@dataclass(frozen=True, slots=True)
class _Malformed:
    """What came instead of a message: gRPC would answer INTERNAL for it by itself, and log a traceback."""

    why: str


def _never_failing(deserialise: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return decode


def _well_formed(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidArgument(
            f"the request is no message of this method: {request.why}",
            fix="use the contract in protos/, of this service's release",
        )
    return request


def _all_well_formed(requests: Iterator[Any]) -> Iterator[Any]:
    return map(_well_formed, requests)


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
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

        well_formed = _all_well_formed if handler.request_streaming else _well_formed

        def unary(behaviour: Any) -> Any:
            def call(request: Any, context: grpc.ServicerContext) -> Any:
                with self._watched(method, context):
                    return behaviour(well_formed(request), context)

            return call

        def streaming(behaviour: Any) -> Any:
            def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
                with self._watched(method, context):
                    yield from behaviour(well_formed(request), context)

            return call

        coders = {
            "request_deserializer": _never_failing(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), **coders)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), **coders)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), **coders)
        return handler  # reflection is the one that streams both ways

    @contextmanager
    def _watched(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            self._count(method, "CANCELLED")
            raise
        except Exception as error:
            # a caller that has gone is told nothing; neither is one whose own stream broke while it was being read
            if not context.is_active() or isinstance(error, grpc.RpcError):
                self._count(method, "CANCELLED")
                if isinstance(error, WeighbridgeError):
                    context.abort_with_status(
                        to_status(error)
                    )  # for grpc, which logs whatever else is raised
                raise
            if isinstance(error, WeighbridgeError):
                known = error
            else:
                log.exception("%s failed", method)
                known = WeighbridgeError(
                    f"the service failed: {type(error).__name__}", fix="its log says more"
                )
            self._count(method, known.grpc_code)
            context.abort_with_status(to_status(known))
        else:
            self._count(method, "OK")
