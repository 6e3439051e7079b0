"""Errors on the wire: ``google.rpc`` status details with a reason, a fix, and the tensors concerned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from weighbridge._core.text.counts import first_lines
from weighbridge._transport import rpc
from weighbridge.errors import DataLoss, ResourceExhausted, WeighbridgeError

_DOMAIN = "weighbridge.v1"
_LONGEST_DETAIL = 300
_LONGEST_MESSAGE = 600
_MOST_BYTES = 2400
"""Maximum bytes of all details together. A status is sent in HTTP/2 headers, and every peer accepts headers of up to 8
KiB. They contain the message percent-encoded (three bytes for each byte of a non-ASCII character), and the whole status
again in base64.
"""


def _with_room(lines: Sequence[str]) -> list[str]:
    """The first lines that fit into `_MOST_BYTES`. The last line states the number of omitted lines."""
    told = [_cut(line, _LONGEST_DETAIL) for line in first_lines(lines)]
    used = accumulate(len(line.encode()) for line in told)
    return first_lines(told, most=sum(length <= _MOST_BYTES for length in used))


def to_status(error: WeighbridgeError) -> Any:
    """The error as a gRPC status."""
    details = {f"detail{i:03}": text for i, text in enumerate(_with_room(error.details))}
    if isinstance(error, DataLoss) and not error.worth_retrying:
        details[rpc.LASTING] = "true"
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
    """The beginning of a string, at most ``most`` bytes in UTF-8."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")
