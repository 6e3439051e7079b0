"""Are the messages that carry weights the protobuf messages of the contract, for any other protobuf library too?"""

from __future__ import annotations

import tracemalloc

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.alone import alone
from weighbridge._transport.pieces import decoder, encode
from weighbridge.v1 import checkpoint_service_pb2 as pb

decode = decoder(pb.PushRequest)
NUMBERS = st.integers(0, 2**64 - 1)


@st.composite
def messages(draw: st.DrawFn) -> pb.PushRequest:
    message = pb.PushRequest(offset=draw(NUMBERS), checksum=draw(NUMBERS))
    if draw(st.booleans()):
        message.header.model = draw(st.text(max_size=200))
        message.header.number = draw(NUMBERS)
    return message


@given(messages(), st.binary(max_size=40_000))
def test_protobuf_reads_what_we_write_and_we_read_what_it_writes(message: pb.PushRequest, data: bytes) -> None:
    whole = pb.PushRequest()
    whole.CopyFrom(message)
    whole.data = data
    assert pb.PushRequest.FromString(encode(message, memoryview(data))) == whole
    for raw in (encode(message, data), whole.SerializeToString()):
        carried = decode(raw)
        assert carried.message == message
        assert carried.data == data


@given(st.binary(max_size=200))
def test_hostile_bytes_are_read_as_protobuf_reads_them_or_refused(raw: bytes) -> None:
    try:
        carried = decode(raw)
    except DecodeError:
        return
    whole = pb.PushRequest()
    whole.CopyFrom(carried.message)
    whole.data = bytes(carried.data)
    try:
        expected = pb.PushRequest.FromString(raw)
    except DecodeError:
        pytest.fail("protobuf refuses what we have read")
    assert expected.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


@alone
def test_a_message_of_more_fields_than_any_has_is_refused_before_they_are_looked_at() -> None:
    """Each takes time and memory of its own: one message of 2 MiB had taken 270 MiB, and seconds of the loop that all
    calls share.
    """
    for field in (b"\x10\1", b"\x1a\0", b"\x32\0", b"\x3d\0\0\0\0"):
        assert decode(field * 64).message
        tracemalloc.start()
        with pytest.raises(DecodeError, match="more than 64 fields"):
            decode(field * 500_000)
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken < 8 << 20, field


@given(messages(), st.binary(min_size=1, max_size=500), st.integers(1, 400))
def test_a_message_cut_short_inside_its_data_is_refused(message: pb.PushRequest, data: bytes, cut: int) -> None:
    raw = encode(message, data)
    with pytest.raises(DecodeError):
        decode(raw[: -min(cut, len(data))])
