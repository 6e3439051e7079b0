"""The yardstick: grpcio streaming the very same messages, with nothing done to them on either side.

``python -m benchmarks.raw_grpc BYTES`` serves them; every message holds other bytes, ready made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from weighbridge import rpc
from weighbridge.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)


def payloads(total: int) -> list[bytes]:
    """Random bytes, cut into messages' worth."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 256, min(rpc.MESSAGE_BYTES, total - offset), np.uint8).tobytes()
        for offset in range(0, total, rpc.MESSAGE_BYTES)
    ]


class _Weights(weight_service_pb2_grpc.WeightServiceServicer):
    def __init__(self, data: list[bytes]) -> None:
        self._data = data

    def Pull(
        self, request: weight_service_pb2.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[weight_service_pb2.PullResponse]:
        offset = 0
        for data in self._data:
            yield weight_service_pb2.PullResponse(offset=offset, data=data, checksum=1)
            offset += len(data)


class _Checkpoints(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    def Push(
        self, request_iterator: Iterator[checkpoint_service_pb2.PushRequest], context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.PushResponse:
        return checkpoint_service_pb2.PushResponse(received_bytes=sum(len(m.data) for m in request_iterator))


def pull(channel: grpc.Channel) -> float:
    """Seconds to pull all messages."""
    started = time.perf_counter()
    received = 0
    for message in weight_service_pb2_grpc.WeightServiceStub(channel).Pull(weight_service_pb2.PullRequest()):
        received += len(message.data)
    return time.perf_counter() - started


def push(channel: grpc.Channel, data: list[bytes]) -> float:
    """Seconds to push all messages."""

    def messages() -> Iterator[checkpoint_service_pb2.PushRequest]:
        offset = 0
        for each in data:
            yield checkpoint_service_pb2.PushRequest(offset=offset, data=each, checksum=1)
            offset += len(each)

    started = time.perf_counter()
    checkpoint_service_pb2_grpc.CheckpointServiceStub(channel).Push(messages())
    return time.perf_counter() - started


def main() -> None:
    """Serve until standard input ends."""
    data = payloads(int(sys.argv[1]))
    server = grpc.server(ThreadPoolExecutor(4), options=rpc.CHANNEL_OPTIONS)
    weight_service_pb2_grpc.add_WeightServiceServicer_to_server(_Weights(data), server)
    checkpoint_service_pb2_grpc.add_CheckpointServiceServicer_to_server(_Checkpoints(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
