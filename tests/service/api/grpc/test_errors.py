"""Does every error fit into the headers that it travels in, with its reason, and as much of its text as there is room
for?
"""

from __future__ import annotations

import base64
from urllib.parse import quote

from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.text.counts import first_lines
from weighbridge.errors import InvalidArgument, LayoutError, ResourceExhausted, WeighbridgeError
from weighbridge_service.api.grpc.errors import to_status

HEADERS = 8 << 10
"""Bytes of headers that every HTTP/2 peer takes."""
texts = st.text(max_size=40) | st.sampled_from(["x" * 20_000, "模" * 5_000, "🚂" * 5_000])


def sent(error: WeighbridgeError) -> tuple[status_pb2.Status, error_details_pb2.ErrorInfo, int]:
    """The status, its ErrorInfo, and the size of the headers in bytes."""
    status = to_status(error)
    headers = {"grpc-message": quote(status.details, safe=" "), **dict(status.trailing_metadata)}
    nbytes = sum(
        len(name) + len(base64.b64encode(value) if isinstance(value, bytes) else value.encode())
        for name, value in headers.items()
    )
    found = status_pb2.Status.FromString(headers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert found.details[0].Unpack(info)
    return found, info, nbytes


@given(texts, texts, st.lists(texts, max_size=30))
def test_an_error_of_any_length_fits_and_begins_as_it_was(message: str, fix: str, details: list[str]) -> None:
    status, info, nbytes = sent(LayoutError(message, fix=fix, details=details))
    assert nbytes < HEADERS - 1000
    assert message.startswith(status.message)
    assert fix.startswith(info.metadata["fix"])
    told = [value for name, value in sorted(info.metadata.items()) if name.startswith("detail")]
    if len(told) < len(details):
        assert told.pop() == f"and {len(details) - len(told)} more"
    assert all(whole.startswith(part) for whole, part in zip(details, told, strict=False))


def test_an_error_that_was_cut_before_says_how_many_lines_it_had() -> None:
    details = first_lines(f"tensor {i} is missing" + 200 * "." for i in range(51))
    assert (len(details), details[-1]) == (20, "and 32 more")
    _, info, _ = sent(LayoutError("it does not fit", details=details))
    told = [value for name, value in sorted(info.metadata.items()) if name.startswith("detail")]
    assert len(told) < 20
    assert told[-1] == f"and {51 - len(told) + 1} more"
    assert all(line.startswith(f"tensor {i} is") for i, line in enumerate(told[:-1]))


def test_a_short_error_is_told_whole() -> None:
    error = InvalidArgument("no such thing", fix="ask for another", details=["a", "b"])
    status, info, _ = sent(error)
    assert (status.message, info.reason, info.domain) == ("no such thing", error.reason, "weighbridge.v1")
    assert dict(info.metadata) == {"fix": "ask for another", "detail000": "a", "detail001": "b"}


def test_when_to_come_again_is_told_if_it_is_known() -> None:
    status, _, _ = sent(ResourceExhausted("full", retry_after=1.25))
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1250
    assert len(sent(ResourceExhausted("full"))[0].details) == 1
