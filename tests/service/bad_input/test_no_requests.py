"""Bytes that are no request: are they refused or cut off, without a failure of the service?"""

from __future__ import annotations

import contextlib
import random
import socket

import grpc
import pytest

from tests.service.bad_input.bench import Bench
from weighbridge._transport import rpc
from weighbridge.errors import InvalidArgument, ResourceExhausted
from weighbridge.v1 import (
    checkpoint_service_pb2,
    engine_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)


def test_a_message_over_the_limit_is_refused(bench: Bench, model: str) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    content = b"\0" * (rpc.MAX_MESSAGE_BYTES + 1)
    with grpc.insecure_channel(bench.running.address, options=unlimited) as channel:
        call = channel.unary_unary("/weighbridge.v1.ModelService/RegisterModel")
        with pytest.raises(grpc.RpcError) as caught:
            call(content, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        push = channel.stream_unary("/weighbridge.v1.CheckpointService/Push")
        with pytest.raises(grpc.RpcError) as caught:
            push(iter([content]), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises((ResourceExhausted, InvalidArgument), match="63 MiB"):
        bench.trainer.register_files(model, {**bench.source.files, "tokenizer.json": content})


def test_malformed_messages_and_unknown_methods_get_an_error_status(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    services = {
        "ModelService": model_service_pb2, "CheckpointService": checkpoint_service_pb2, "EngineService": engine_service_pb2,
        "WeightService": weight_service_pb2, "LocalLaneService": local_lane_pb2, "ReplicaService": replica_service_pb2,
    }  # fmt: skip
    garbage = [
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\x7f",
        random.Random(1).randbytes(1000),
        b"\x0a\x02\xff\xfe",
    ]
    with grpc.insecure_channel(bench.running.address) as channel:
        for service, module in services.items():
            for method in module.DESCRIPTOR.services_by_name[service].methods:
                path = f"/weighbridge.v1.{service}/{method.name}"
                make = getattr(
                    channel,
                    ("stream" if method.client_streaming else "unary")
                    + ("_stream" if method.server_streaming else "_unary"),
                )
                for number, data in enumerate(garbage):
                    code = grpc.StatusCode.OK
                    try:
                        answer = make(path)(iter([data]) if method.client_streaming else data, timeout=60)
                        if method.server_streaming:
                            list(answer)
                    except grpc.RpcError as error:
                        code = error.code()
                    # after the first, they may be messages with unknown fields only, which protobuf lets pass
                    assert code is grpc.StatusCode.INVALID_ARGUMENT or (number and code is grpc.StatusCode.OK), path
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/weighbridge.v1.ModelService/Evil")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    ours = ("weighbridge_service.api", "grpc", "asyncio")
    assert [each for each in caplog.records if each.exc_info and each.name.startswith(ours)] == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 10_000,
        random.Random(2).randbytes(100_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(3).randbytes(10_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"",
    ],
    ids=["HTTP/1.1", "zeros", "random", "HTTP/2 and random", "huge frame", "TLS", "nothing"],
)
def test_what_is_no_grpc_is_cut_off(bench: Bench, data: bytes) -> None:
    host, port = bench.running.address.rsplit(":", 1)
    for _ in range(5):
        with (
            socket.create_connection((host, int(port)), timeout=60) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
