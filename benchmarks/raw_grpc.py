"""Yardstick: grpcio streaming the same messages, with nothing done to them on either side.

``python -m benchmarks.raw_grpc`` serves any number of bytes. Messages are ready made and hold random bytes, 64 MiB of
them over and over again: more than caches hold.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from weighbridge._transport import rpc
from weighbridge.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)

_RING_MESSAGES = 64
_THREADS = 16


def ring() -> list[bytes]:
    """Messages' worth of random bytes."""
    rng = np.random.default_rng(0)
    return [rng.bytes(rpc.MESSAGE_BYTES) for _ in range(_RING_MESSAGES)]


def payloads(ring: list[bytes], total: int) -> Iterator[bytes]:
    """The messages of a ring, again and again, up to this many bytes."""
    left = total
    for data in itertools.cycle(ring):
        if left <= 0:
            return
        yield data if left >= len(data) else data[:left]
        left -= len(data)


class _Weights(weight_service_pb2_grpc.WeightServiceServicer):
    def __init__(self, ring: list[bytes]) -> None:
        self._ring = ring

    def Pull(
        self, request_iterator: Iterator[weight_service_pb2.PullRequest], context: grpc.ServicerContext
    ) -> Iterator[weight_service_pb2.PullResponse]:
        offset = 0
        for data in payloads(self._ring, int(next(request_iterator).version)):
            yield weight_service_pb2.PullResponse(offset=offset, data=data, checksum=1)
            offset += len(data)


class _Checkpoints(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    def Push(
        self, request_iterator: Iterator[checkpoint_service_pb2.PushRequest], context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.PushResponse:
        return checkpoint_service_pb2.PushResponse(received_bytes=sum(len(m.data) for m in request_iterator))


def pull(channel: grpc.Channel, total: int) -> int:
    """Pull this many bytes; returns the number of bytes that came."""
    request = weight_service_pb2.PullRequest(version=str(total))
    answers = weight_service_pb2_grpc.WeightServiceStub(channel).Pull(iter([request]))
    return sum(len(message.data) for message in answers)


def push(channel: grpc.Channel, ring: list[bytes], total: int) -> int:
    """Push this many bytes; returns the number of bytes that arrived."""

    def messages() -> Iterator[checkpoint_service_pb2.PushRequest]:
        offset = 0
        for each in payloads(ring, total):
            yield checkpoint_service_pb2.PushRequest(offset=offset, data=each, checksum=1)
            offset += len(each)

    response = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel).Push(messages())
    return int(response.received_bytes)


def main() -> None:
    """Serve until standard input ends."""
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=rpc.CHANNEL_OPTIONS)
    # one method of each is enough
    weights, checkpoints = _Weights(ring()), _Checkpoints()  # type: ignore[abstract]
    weight_service_pb2_grpc.add_WeightServiceServicer_to_server(weights, server)
    checkpoint_service_pb2_grpc.add_CheckpointServiceServicer_to_server(checkpoints, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
