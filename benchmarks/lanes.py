"""Which lane is a client asked to take, and which one did it take?"""

from __future__ import annotations

import inspect
from typing import Any

from weighbridge import EngineClient, TrainerClient

LANES = ("grpc", "local", "auto")


def takes_lane(client: type[TrainerClient | EngineClient]) -> bool:
    """Whether a client can be told which lane to take; one that cannot has gRPC only."""
    return "lane" in inspect.signature(client).parameters


def lane_argument(client: type[TrainerClient | EngineClient], lane: str) -> dict[str, Any]:
    """The constructor's argument for a lane.

    Raises:
        ValueError: the client has no such lane.
    """
    if takes_lane(client):
        return {"lane": lane}
    if lane != "grpc":
        raise ValueError(f"{client.__name__} has no lane {lane!r}")
    return {}


def lane_taken(report: object) -> str:
    """The lane that a push or a pull says it took."""
    return str(getattr(report, "lane", "grpc"))
