"""Ranks of one push, many in each process: each is a task of an event loop, and declares, pushes and seals as a
trainer's rank does.

    python -m tests.support.many_ranks ADDRESS MODEL RANKS FIRST LAST STEP

plays the ranks from FIRST up to LAST of a push of RANKS ranks. Each holds some rows of one tensor of ones, and the
first one all other tensors; names and shapes come as JSON by stdin. It says that it is there, and begins when it gets
another line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import rpc, wire
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import checkpoint_service_pb2_grpc

TENSOR = "model.embed_tokens.weight"
SECONDS = 120.0


async def play(stub: Any, model: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int, step: int) -> int:
    """Push as one rank; returns the version's number.

    Rows of the embedding are spread over all ranks, the first one has the rest.
    """
    client_id = f"client-{rank}"
    opening = pb.OpenVersionRequest(
        model=model, step=step, run="r", ranks=ranks, request_id=f"r/{step}", client_id=client_id
    )
    number = (await stub.OpenVersion(opening, timeout=SECONDS)).version.number
    rows, width = shapes[TENSOR]
    begin, end = (rows * each // ranks for each in (rank, rank + 1))
    specs = [TensorSpec(TENSOR, dtypes.parse("fp32"), shapes[TENSOR])]
    shards = [Shard(TENSOR, Box((begin, 0), (end - begin, width)))]
    if rank == 0:
        for name, shape in shapes.items():
            if name != TENSOR:
                specs.append(TensorSpec(name, dtypes.parse("fp32"), shape))
                shards.append(Shard(name, Box.whole(shape)))
    layout = Layout.stream(specs, shards)
    request = pb.DeclareLayoutRequest(model=model, number=number, rank=rank, client_id=client_id, digest=layout.digest)
    while True:
        answer = await stub.DeclareLayout(iter([request]), timeout=SECONDS)
        if answer.layout_needed:
            request.layout.CopyFrom(wire.layout_to_proto(layout, TensorSpace.HUGGING_FACE))
        elif answer.retry_after_ms:
            request.ClearField("layout")
            await asyncio.sleep(answer.retry_after_ms / 1000)
        else:
            break

    data = b"\x00\x00\x80\x3f" * (answer.stream_bytes // 4)

    async def messages() -> Any:
        yield pb.PushRequest(header=pb.PushHeader(model=model, number=number, rank=rank, client_id=client_id))
        yield pb.PushRequest(offset=0, data=data, checksum=rpc.checksum(data))

    await stub.Push(messages(), timeout=SECONDS)
    await stub.SealRank(pb.SealRankRequest(model=model, number=number, rank=rank, client_id=client_id), timeout=SECONDS)
    return int(number)


async def main() -> None:
    """Plays some ranks."""
    address, model = sys.argv[1:3]
    ranks, first, last, step = map(int, sys.argv[3:7])
    shapes = {name: tuple(shape) for name, shape in json.loads(sys.stdin.readline()).items()}
    print("there", flush=True)
    sys.stdin.readline()
    async with grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) as channel:
        stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
        numbers = await asyncio.gather(*(play(stub, model, shapes, rank, ranks, step) for rank in range(first, last)))
    assert len(set(numbers)) == 1
    print(numbers[0])


if __name__ == "__main__":
    asyncio.run(main())
