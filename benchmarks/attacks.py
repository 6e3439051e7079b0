"""Attacks on a service as values: which connections are opened, what is sent and what is withheld.

`benchmarks.attacker_process` runs them.

All attacks take once what they can get, and keep it. They test what a service has to bound: calls that send nothing,
half-sent requests, responses that the client never reads, messages whose last byte never comes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.http2_frames import DEFAULT_WINDOW, LARGEST_WINDOW, message_head
from weighbridge.v1 import local_lane_pb2, weight_service_pb2

CALLS_A_CONNECTION = 100
SILENT, HALF_OPEN, UNREAD, WITHHELD = 3200, 1100, 1000, 24
AGAIN_SECONDS = 2.0
MESSAGE_BYTES = 60 << 20
LANE_MESSAGE_BYTES = 64 << 20
"""The most that a message of the local lane may announce."""
FEW_DESCRIPTORS = 1024
"""Usual default limit of a process's descriptors."""
_MODELS, _CHECKPOINTS = "/weighbridge.v1.ModelService/", "/weighbridge.v1.CheckpointService/"
PULL = "/weighbridge.v1.WeightService/Pull"
REGISTER, DECLARE, PUSH = _MODELS + "RegisterModel", _CHECKPOINTS + "DeclareLayout", _CHECKPOINTS + "Push"
_SILENT_PATHS = (_MODELS + "GetVersion", _MODELS + "WatchRefs", REGISTER, PULL, PUSH)
_LANE_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Door:
    """Address that attackers connect to.

    Attributes:
        address: ``host:port``, or the path of a Unix socket.
        source: the address that they connect from.
        metadata: names and values of the metadata of their calls.
    """

    address: str
    source: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Doors:
    """All doors of one service.

    Attributes:
        control: door of calls that carry no weights.
        bulk: door of pulls and pushes.
        http: the HTTP face.
        lane: the Unix socket.
    """

    control: Door
    bulk: Door
    http: Door
    lane: Door


@dataclass(frozen=True)
class Part:
    """Connections that are all alike.

    Attributes:
        name: description of the connections.
        door: address that they connect to.
        connections: number of connections.
        calls: gRPC calls on each; 0 for connections that do not speak HTTP/2.
        paths: paths of the calls, in turn.
        opening: bytes that are sent on each call, or on each connection if there are no calls, as hexadecimal digits.
        withheld: bytes that are sent after that; one more is announced and never sent.
        ends: whether a call's request stream ends after the opening.
        window: bytes that the service may send on each call.
        deaf: whether nothing is read from the connection.
        again: seconds after which a connection that the service has closed is opened again; 0 for never.
    """

    name: str
    door: Door
    connections: int
    calls: int = 0
    paths: tuple[str, ...] = ()
    opening: str = ""
    withheld: int = 0
    ends: bool = False
    window: int = DEFAULT_WINDOW
    deaf: bool = False
    again: float = 0.0

    def scaled(self, scale: float) -> Part:
        """A smaller one, or a larger one: of calls if there are several on each connection, otherwise of
        connections.
        """
        wanted = max(round(self.connections * max(self.calls, 1) * scale), 1)
        calls = min(self.calls, wanted)
        return replace(self, connections=max(round(wanted / max(calls, 1)), 1), calls=calls)

    def spread(self, sources: Sequence[str]) -> list[Part]:
        """The same from several addresses; a Unix socket has none."""
        if self.door.address.startswith("/"):
            return [self]
        shares = [
            self.connections * (i + 1) // len(sources) - self.connections * i // len(sources)
            for i in range(len(sources))
        ]
        return [
            replace(self, connections=share, door=replace(self.door, source=source))
            for share, source in zip(shares, sources, strict=True)
            if share
        ]

    @property
    def said(self) -> str:
        """For people."""
        if not self.calls:
            return f"{self.connections} {self.name}"
        return f"{self.connections * self.calls} {self.name} over {self.connections} connections"


def silent(doors: Doors) -> list[Part]:
    """Calls that send headers and nothing else."""
    connections = SILENT // CALLS_A_CONNECTION
    return [Part("silent calls", doors.control, connections, CALLS_A_CONNECTION, _SILENT_PATHS)]


def silent_spread(doors: Doors) -> list[Part]:
    """As many, each on a connection of its own."""
    return [Part("silent calls", doors.control, SILENT, 1, _SILENT_PATHS)]


def half_requests(doors: Doors) -> list[Part]:
    """Half a request over HTTP."""
    half = b"GET / HTTP/1.1\r\nHost:".hex()
    return [Part("halves of HTTP requests", doors.http, HALF_OPEN, opening=half)]


def half_open(doors: Doors) -> list[Part]:
    """The same, and connections to the gRPC port that say nothing."""
    return [*half_requests(doors), Part("bare connections to the gRPC port", doors.control, HALF_OPEN)]


def half_open_again(doors: Doors) -> list[Part]:
    """As `half_open`, from an attacker that reconnects."""
    return [replace(part, again=AGAIN_SECONDS) for part in half_open(doors)]


def unread(door: Door, model: str) -> list[Part]:
    """Pulls whose client never opens its window, and as many whose client does, and never reads."""
    request = weight_service_pb2.PullRequest(model=model, version="live")
    request.layout.full.SetInParent()
    raw = request.SerializeToString()
    closed = Part(
        "pulls with a closed window", door, UNREAD // 2 // CALLS_A_CONNECTION, CALLS_A_CONNECTION, (PULL,),
        opening=(message_head(len(raw)) + raw).hex(), ends=True, window=0,
    )  # fmt: skip
    deaf = replace(closed, name="pulls that are never read", window=LARGEST_WINDOW, deaf=True)
    return [closed, deaf]


def withheld(doors: Doors, path: str) -> list[Part]:
    """Messages of which all but the last byte comes; of a stream, the first."""
    door = doors.bulk if path == PUSH else doors.control
    name = f"messages withheld from {path.rpartition('/')[2]}"
    opening = message_head(MESSAGE_BYTES).hex()
    return [Part(name, door, WITHHELD, 1, (path,), opening, MESSAGE_BYTES - 1)]


def withheld_lane(doors: Doors) -> list[Part]:
    """Clients of the Unix socket that send their hello, then announce the largest message and withhold its last
    byte.
    """
    hello = local_lane_pb2.LaneRequest(id=1, hello=local_lane_pb2.LaneHello(client_id="siege")).SerializeToString()
    opening = _LANE_LENGTH.pack(len(hello)) + hello + _LANE_LENGTH.pack(LANE_MESSAGE_BYTES)
    return [
        Part(
            "messages withheld from the local lane",
            doors.lane,
            WITHHELD,
            opening=opening.hex(),
            withheld=LANE_MESSAGE_BYTES - 1,
        )
    ]


def withheld_everywhere(doors: Doors) -> list[Part]:
    """As many at each door that takes long messages."""
    calls = (part for path in (REGISTER, DECLARE, PUSH) for part in withheld(doors, path))
    return [*calls, *withheld_lane(doors)]


def everything(doors: Doors, model: str) -> list[Part]:
    """All at once: the half-open connections and the withheld messages are spread over the doors."""
    return [
        *silent(doors),
        *_divided(half_open(doors)),
        *unread(doors.bulk, model),
        *_divided(withheld_everywhere(doors)),
    ]


def more_than_everything(doors: Doors, model: str) -> list[Part]:
    """As many half-open connections and withheld messages at each door."""
    return [*silent(doors), *half_open(doors), *unread(doors.bulk, model), *withheld_everywhere(doors)]


def _divided(parts: Sequence[Part]) -> list[Part]:
    """As many connections together as each part has by itself."""
    return [replace(part, connections=part.connections // len(parts)) for part in parts]


@dataclass(frozen=True)
class Attack:
    """A named attack.

    Attributes:
        parts: makes the parts of the attack, given the doors and a model.
        descriptors: limit of the service's descriptors during the attack; None for the machine's limit.
    """

    parts: Callable[[Doors, str], Sequence[Part]]
    descriptors: int | None = None


ATTACKS = {
    "silent": Attack(lambda doors, _: silent(doors)),
    "silent-spread": Attack(lambda doors, _: silent_spread(doors)),
    "half-requests": Attack(lambda doors, _: half_requests(doors), FEW_DESCRIPTORS),
    "half-open": Attack(lambda doors, _: half_open(doors)),
    "half-open-again": Attack(lambda doors, _: half_open_again(doors)),
    "unread": Attack(lambda doors, model: unread(doors.bulk, model)),
    "unread-known": Attack(lambda doors, model: unread(doors.control, model)),
    "withheld": Attack(lambda doors, _: withheld(doors, REGISTER)),
    "withheld-declare": Attack(lambda doors, _: withheld(doors, DECLARE)),
    "withheld-push": Attack(lambda doors, _: withheld(doors, PUSH)),
    "withheld-lane": Attack(lambda doors, _: withheld_lane(doors)),
    "all": Attack(everything),
    "all-few-descriptors": Attack(everything, FEW_DESCRIPTORS),
    "more-than-all": Attack(more_than_everything),
}
