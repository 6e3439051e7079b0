"""``python -m benchmarks.watcher_process SPEC``: engines that watch a ref, each connection of its own.

SPEC is a `WatcherSpec` as JSON. The process writes a line to standard output when all watches have begun, or have
failed. Each line on standard input, ``{"number": ..., "seconds": ...}``, asks when the watches received a version. The
answer is a `Heard` as JSON, as soon as all have received it, or after so many seconds. Moments are those of the
machine's monotonic clock. Messages are kept as they came and decoded when a line asks for them, so that the watchers
take little of the processors that they share with the service.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio

from benchmarks.frame_watchers import FrameWatchers
from benchmarks.watching import FRAMES, START_SECONDS, WATCH, Heard, WatcherSpec, watched
from weighbridge._transport import rpc
from weighbridge.v1 import model_service_pb2
from weighbridge_service.runtime.descriptors import raise_limit

_AT_ONCE = 64
"""Watches that begin at one time: a thousand engines do not start in the same millisecond, and a full backlog costs a
second.
"""


class Watchers:
    """All watches of one process, by gRPC's own client in one event loop.

    Args:
        spec: which.
    """

    def __init__(self, spec: WatcherSpec) -> None:
        self._spec = spec
        self._arrived: list[tuple[float, bytes]] = []
        self._refused: Counter[str] = Counter()
        self._begun = self._watching = 0
        self._beginning = asyncio.Semaphore(_AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self._awaited: Callable[[], bool] = lambda: False
        self._reached = asyncio.Event()

    async def begin(self) -> Heard:
        """Begin all watches; returns their states once each has received the current version, or has failed."""
        spec = self._spec
        options = (*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        request = watched(spec.model, spec.ref)
        for _ in range(spec.connections):
            channel: Any = grpc.aio.insecure_channel(spec.address, options=options)
            watch = channel.unary_stream(WATCH)
            for _ in range(spec.streams):
                self._tasks.append(asyncio.create_task(self._watch(watch, request)))
        await self._until(lambda: self._begun == len(self._tasks), START_SECONDS)
        self._arrived.clear()
        return Heard([], self._watching, dict(self._refused))

    async def heard(self, number: int, seconds: float) -> Heard:
        """Moments at which each watch received this version, as soon as all have."""
        await self._until(lambda: len(self._arrived) >= self._watching, seconds)
        arrived, self._arrived = self._arrived, []
        response = model_service_pb2.WatchRefsResponse
        moments = [moment for moment, raw in arrived if response.FromString(raw).version.number == number]
        return Heard(moments, self._watching, dict(self._refused))

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        self._awaited = holds
        self._reached.clear()
        self._look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reached.wait(), seconds)

    def _look(self) -> None:
        if self._awaited():
            self._reached.set()

    async def _watch(self, watch: Any, request: bytes) -> None:
        told = False
        try:
            async with self._beginning:
                responses = aiter(call := watch(request))
                self._note(await anext(responses))
                told = True
                self._begun += 1
                self._watching += 1
                self._look()
            async for raw in responses:
                self._note(raw)
            self._refused[(await call.code()).name] += 1
        except StopAsyncIteration:
            self._refused["OK"] += 1
        except grpc.RpcError as error:
            self._refused[error.code().name] += 1
        finally:
            self._watching -= told
            self._begun += not told
            self._look()

    def _note(self, raw: bytes) -> None:
        self._arrived.append((time.monotonic(), raw))
        self._look()


async def run(spec: WatcherSpec) -> None:
    """Watch until standard input ends."""
    watchers = Watchers(spec)
    print(json.dumps(asdict(await watchers.begin())), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(asdict(await watchers.heard(**json.loads(line)))), flush=True)


def main(argv: Sequence[str]) -> None:
    """Watch."""
    spec = WatcherSpec(**json.loads(argv[0]))
    if spec.client == FRAMES:
        FrameWatchers(spec).run()
    else:
        raise_limit()
        asyncio.run(run(spec))


if __name__ == "__main__":
    main(sys.argv[1:])
