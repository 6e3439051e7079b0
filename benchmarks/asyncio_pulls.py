"""``python -m benchmarks.asyncio_pulls``: pulls of the asyncio client next to those of the blocking one, in one run,
and how late its loop is.

One service on loopback holds one model of random bf16 weights; every round pulls all of it by each client, on each
lane: into tensors that are there already, and iterated, which makes them. Every other pull on a loop is not timed:
there a task asks to be woken every millisecond, and its lateness is what the pull costs everybody else on the loop.
``on the loop`` is bare grpc.aio with checks and copies on the loop itself: what `weighbridge.aio` would be without
threads.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import torch

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL
from weighbridge import AsyncEngineClient, EngineClient, TrainerClient
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.slices import FullTensors
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._formats.tensor_stream import StreamWriter
from weighbridge._transport import pieces, rpc, wire
from weighbridge.v1 import weight_service_pb2

_TICK = 0.001

Way: TypeAlias = Callable[[], tuple[float, list[float]]]
"""A way to pull everything: returns the seconds, and the delays in seconds of a task on the same loop."""


async def measured(work: Callable[[], Awaitable[object]]) -> tuple[float, list[float]]:
    """Seconds that something took, and, when it is done again, by how many seconds a task on the same loop was woken
    too late.
    """
    started = time.perf_counter()
    await work()
    seconds = time.perf_counter() - started
    late: list[float] = []

    async def tick() -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_TICK)
            late.append(time.perf_counter() - asked - _TICK)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work()
    ticking.cancel()
    return seconds, late


class Bench:
    """The tensors of one model, and ways of pulling them.

    Args:
        address: address of the service.
        layout: the model's whole tensors.
        connections: connections of each client.
    """

    def __init__(self, address: str, layout: Layout, connections: int) -> None:
        self._address = address
        self._layout = layout
        self._connections = connections
        self._tensors = [torch.ones(shape, dtype=dtype) for dtype, shape in models.shapes_of(layout)]

    def blocking(self, lane: str, *, iterated: bool) -> tuple[float, list[float]]:
        """The blocking client, as the other two."""
        with EngineClient(self._address, lane=lane, connections=self._connections) as client:
            pull = client.pull(MODEL)
            started = time.perf_counter()
            for _ in pull if iterated else pull.filled(self._tensors.__getitem__):
                pass
            return time.perf_counter() - started, []

    async def into(self, lane: str) -> tuple[float, list[float]]:
        """Pull with the asyncio client into existing tensors."""
        async with AsyncEngineClient(self._address, lane=lane, connections=self._connections) as client:
            pull = client.pull(MODEL)
            await pull.plan()
            return await measured(lambda: pull.fill(self._tensors.__getitem__))

    async def iterated(self, lane: str) -> tuple[float, list[float]]:
        """The asyncio client, tensor by tensor."""

        async def take() -> None:
            async for _ in pull:
                pass

        async with AsyncEngineClient(self._address, lane=lane, connections=self._connections) as client:
            pull = client.pull(MODEL)
            await pull.plan()
            return await measured(take)

    async def on_the_loop(self) -> tuple[float, list[float]]:
        """Bare grpc.aio, checks and copies on the loop."""
        async with grpc.aio.insecure_channel(self._address, options=rpc.CHANNEL_OPTIONS) as channel:
            pull = channel.unary_stream(
                "/weighbridge.v1.WeightService/Pull",
                weight_service_pb2.PullRequest.SerializeToString,
                pieces.decoder(weight_service_pb2.PullResponse),
            )
            request = weight_service_pb2.PullRequest(
                model=MODEL, version="latest", layout=wire.request_to_proto(FullTensors())
            )

            async def take() -> None:
                writer, position = StreamWriter(self._layout, self._tensors.__getitem__), 0
                async for piece in pull(request):
                    data = rpc.checked(piece, position)
                    position += len(data)
                    for _ in writer.feed(data):
                        pass

            return await measured(take)


def push(address: str, folder: Path, layout: Layout) -> None:
    """Put a version of the model into the service."""
    held = models.RandomBits(p.nbytes for p in layout.placements).of_layout(layout)
    shards = TensorSource(StagingPool(), layout, held)
    with TrainerClient(address) as trainer:
        trainer.register_model(MODEL, folder)
        trainer.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=1, rank=0, world_size=1).wait(
            timeout=600
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.asyncio_pulls", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--connections", type=int, default=1, help="of each client (default 1)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        specs = models.hugging_face_specs(models.write_config(models.config_of(args.gb), folder / "hf"))
        layout = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
        with processes.service(folder, layout.nbytes) as service:
            push(service.grpc, folder / "hf", layout)
            bench = Bench(service.grpc, layout, args.connections)
            ways: dict[str, Way] = {
                "grpc, into": lambda: bench.blocking("grpc", iterated=False),
                "grpc, into, asyncio": lambda: asyncio.run(bench.into("grpc")),
                "grpc, into, on the loop": lambda: asyncio.run(bench.on_the_loop()),
                "grpc, iterated": lambda: bench.blocking("grpc", iterated=True),
                "grpc, iterated, asyncio": lambda: asyncio.run(bench.iterated("grpc")),
                "local, into": lambda: bench.blocking("local", iterated=False),
                "local, into, asyncio": lambda: asyncio.run(bench.into("local")),
                "local, iterated": lambda: bench.blocking("local", iterated=True),
                "local, iterated, asyncio": lambda: asyncio.run(bench.iterated("local")),
            }
            for number in range(args.rounds + 1):
                for name, way in ways.items():
                    took, woken = way()
                    if number:
                        seconds.setdefault(name, []).append(took)
                        late.setdefault(name, []).extend(woken)
    print(f"{layout.nbytes / 1e9:.2f} GB, {args.rounds} rounds, medians")
    print(
        report.table(
            ["", "seconds", "least", "/blocking", "loop late ms: median", "99 %", "most"],
            (_row(name, seconds, late[name]) for name in ways),
        )
    )
    if args.json is not None:
        report.write_json(args.json, bytes=layout.nbytes, seconds=seconds, late=late)


def _row(name: str, seconds: dict[str, list[float]], late: list[float]) -> list[str]:
    yardstick = seconds[", ".join(name.split(", ")[:2])]
    ratio = statistics.median(a / b for a, b in zip(seconds[name], yardstick, strict=True))
    ordered = sorted(late)
    lateness = [ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]] if ordered else []
    return [
        name,
        f"{statistics.median(seconds[name]):.3f}",
        f"{min(seconds[name]):.3f}",
        f"{ratio:.2f}",
        *(f"{each * 1e3:.2f}" for each in lateness),
        *[""] * (3 - len(lateness)),
    ]


if __name__ == "__main__":
    main()
