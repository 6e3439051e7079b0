"""Watchers as values: their specification, and when they received a version."""

from __future__ import annotations

from dataclasses import dataclass, field

from weighbridge.v1 import model_service_pb2 as pb

WATCH = "/weighbridge.v1.ModelService/WatchRefs"
START_SECONDS = 60.0
"""Seconds in which all watches have to begin."""
AIO, FRAMES = "aio", "frames"
CLIENTS = (AIO, FRAMES)
"""Clients of watches: gRPC's own for asyncio, and bare frames of HTTP/2 (`benchmarks.frame_watchers`)."""


def watched(model: str, ref: str) -> bytes:
    """The encoded request of a watch of one ref."""
    return pb.WatchRefsRequest(refs=[pb.WatchedRef(model=model, ref=ref)]).SerializeToString()


@dataclass(frozen=True)
class WatcherSpec:
    """Specification of watchers.

    Attributes:
        address: address of the server.
        model: model of the ref.
        ref: the ref to watch.
        connections: TCP connections.
        streams: watches on each connection.
        client: client of the watches, one of `CLIENTS`.
    """

    address: str
    model: str
    ref: str
    connections: int
    streams: int
    client: str = AIO


@dataclass
class Heard:
    """States of watches.

    Attributes:
        moments: when each watch received the version in question.
        watching: watches that have begun and not ended.
        refused: number of watches that have ended, by status code.
    """

    moments: list[float] = field(default_factory=list)
    watching: int = 0
    refused: dict[str, int] = field(default_factory=dict)
