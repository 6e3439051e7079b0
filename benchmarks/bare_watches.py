"""``python -m benchmarks.bare_watches``: a bare ``grpc.aio`` server that tells watches of a ref, and does nothing else.

A yardstick of how fast a service in Python can be: `WatchRefs` waits for one `asyncio.Event` that all watches share,
`SetRef` sets it. There is no store, and nothing is checked. A line on standard output says its address; it serves until
standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from weighbridge._transport import rpc
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import model_service_pb2_grpc, resources_pb2
from weighbridge_service.runtime.descriptors import raise_limit


class BareModels(model_service_pb2_grpc.ModelServiceServicer):
    """`WatchRefs` and `SetRef` of one ref."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()
        self._version = resources_pb2.Version(
            model="bench/history", number=1, state=resources_pb2.VERSION_STATE_DURABLE, step=1, run="r", ranks=1,
            tensor_bytes=1 << 30, received_bytes=1 << 30, create_time_ms=1 << 40, ready_time_ms=1 << 40,
            verified_time_ms=1 << 40, durable_time_ms=1 << 40,
        )  # fmt: skip

    async def WatchRefs(
        self,
        request: pb.WatchRefsRequest,
        context: grpc.aio.ServicerContext[pb.WatchRefsRequest, pb.WatchRefsResponse],
    ) -> AsyncIterator[pb.WatchRefsResponse]:
        """The version now, and each time it moves."""
        while True:
            moved = self._moved
            yield pb.WatchRefsResponse(version=self._version)
            await moved.wait()

    async def SetRef(
        self,
        request: pb.SetRefRequest,
        context: grpc.aio.ServicerContext[pb.SetRefRequest, pb.SetRefResponse],
    ) -> pb.SetRefResponse:
        """Moves the ref."""
        version = resources_pb2.Version()
        version.CopyFrom(self._version)
        version.number = int(request.version)
        self._version = version
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        return pb.SetRefResponse(version=version)


async def serve() -> None:
    """Serve until standard input ends."""
    server = grpc.aio.server(options=rpc.CHANNEL_OPTIONS)
    models = BareModels()  # type: ignore[abstract] # two methods are enough
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(models, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    """Serve."""
    raise_limit()
    asyncio.run(serve())


if __name__ == "__main__":
    main()
