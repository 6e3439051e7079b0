"""Watches that speak bare HTTP/2 frames: the cost of engines on other machines to a service, without the engines' own
cost to these processors.

gRPC's own client takes longer to receive a message than a server takes to send it. These watchers record when each
message comes, and decode it later.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks import http2_frames as h2
from benchmarks.attacks import Door, Part
from benchmarks.held_connections import Counts, Http2Connection, Standing
from benchmarks.watching import START_SECONDS, WATCH, Heard, WatcherSpec, watched
from weighbridge.v1 import model_service_pb2

_PAUSE_SECONDS = 0.05
_MESSAGE_HEAD = 5


class FrameWatch(Http2Connection):
    """One connection with its watches.

    Attributes:
        arrived: messages that have come, and when.
        begun: watches that have received a version.
    """

    def __init__(self, part: Mapping[str, Any], counts: Counts) -> None:
        self.arrived: list[tuple[float, bytes]] = []
        self.begun: set[int] = set()
        self._moment = 0.0
        super().__init__(part, counts)

    def received(self, data: bytes) -> None:
        """See `Connection`."""
        self._moment = time.monotonic()
        super().received(data)

    def came(self, frame: h2.Frame) -> None:
        """See `Http2Connection`. A message of this size lies in one frame."""
        super().came(frame)
        if frame.kind == h2.DATA and len(frame.payload) > _MESSAGE_HEAD:
            self.arrived.append((self._moment, frame.payload[_MESSAGE_HEAD:]))
            self.begun.add(frame.stream)


class FrameWatchers:
    """All watches of one process; what `benchmarks.watcher_process` says of its lines holds.

    Args:
        spec: which.
    """

    def __init__(self, spec: WatcherSpec) -> None:
        request = watched(spec.model, spec.ref)
        part = Part(
            "watches", Door(spec.address), spec.connections, spec.streams, (WATCH,),
            (h2.message_head(len(request)) + request).hex(), ends=True, window=h2.LARGEST_WINDOW,
        )  # fmt: skip
        self._all = spec.connections * spec.streams
        self._counts = Counts(part.name)
        self._standing = Standing()
        self._watches = [FrameWatch(asdict(part), self._counts) for _ in range(spec.connections)]
        for each in self._watches:
            self._standing.add(each)

    def run(self) -> None:
        """Watch until standard input ends."""
        number, deadline = 0, time.monotonic() + START_SECONDS
        asked = True
        while (line := self._standing.turn(_PAUSE_SECONDS)) is not None:
            if line:
                question = json.loads(line)
                number, deadline = question["number"], time.monotonic() + question["seconds"]
                asked = True
            if asked and (self._complete or time.monotonic() > deadline):
                asked = False
                print(json.dumps(asdict(self._heard(number))), flush=True)

    @property
    def _complete(self) -> bool:
        return sum(len(each.arrived) for each in self._watches) + self._counts.ended >= self._all

    def _heard(self, number: int) -> Heard:
        response, moments = model_service_pb2.WatchRefsResponse, []
        for each in self._watches:
            arrived, each.arrived = each.arrived, []
            moments += [moment for moment, raw in arrived if response.FromString(raw).version.number == number]
        begun, ended = sum(len(each.begun) for each in self._watches), self._counts.ended
        return Heard(moments, min(begun, self._all - ended), {"ended": ended} if ended else {})
