"""Is the range of a Range header the bytes that slicing gives, and every other header passed over?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge_service.api.http.ranges import ByteRange, RangeNotSatisfiable, byte_range

size = st.integers(0, 50)
number = st.integers(0, 60) | st.just(10**25)
spelled = st.sampled_from(["bytes={}", "Bytes = {}", " bytes={} ", "bytes=000{}"])


def bytes_asked(header: str, data: bytes) -> bytes:
    try:
        asked = byte_range(header, len(data))
    except RangeNotSatisfiable:
        return b""
    assert asked.partial
    assert 0 <= asked.start < asked.end <= len(data)
    return data[asked.start : asked.end]


@given(size, number, number, spelled)
def test_from_one_byte_to_another(length: int, first: int, more: int, spelling: str) -> None:
    data = bytes(range(length))
    assert bytes_asked(spelling.format(f"{first}-{first + more}"), data) == data[first : first + more + 1]
    assert bytes_asked(spelling.format(f"{first}-"), data) == data[first:]


@given(size, number)
def test_the_last_bytes(length: int, last: int) -> None:
    data = bytes(range(length))
    assert bytes_asked(f"bytes=-{last}", data) == (data[-last:] if last else b"")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=5-4",
        "bytes=0-1,3-4",
        "items=0-1",
        "bytes=-1-",
        "bytes=٣-4",
    ],
)
def test_what_is_no_single_range_of_bytes_gives_the_whole_file(header: str | None) -> None:
    assert byte_range(header, 10) == ByteRange(0, 10, partial=False)


def test_a_range_behind_the_end_is_refused_with_the_size() -> None:
    with pytest.raises(RangeNotSatisfiable, match="10 bytes") as caught:
        byte_range("bytes=10-", 10)
    assert caught.value.size == 10
