"""Ways of one client to the service that carry weights: memory that both share, and connections for streams."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial

from weighbridge import bulk, rpc
from weighbridge.local_lane import LocalLane, lane_wanted
from weighbridge.striping import default_connections
from weighbridge.v1 import local_lane_pb2, local_lane_pb2_grpc

_LANE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Transport:
    """What carries one client's weights. Connects when first used; thread-safe.

    Attributes:
        server: the service's address.
        retry_seconds: how long to keep trying when the service cannot be reached, or has no room.
        lane: the local lane.
        connections: for streams.
        replicas: for streams to other replicas of the service, by their addresses; see `connections_to`.
    """

    server: str
    retry_seconds: float
    lane: LocalLane
    connections: bulk.Connections
    replicas: dict[str, bulk.Connections] = field(default_factory=dict)

    @staticmethod
    def make(
        server: str, client_id: str, *, retry_seconds: float, lane: str | None, connections: int | None
    ) -> Transport:
        """The transport of a client whose arguments are these.

        Raises:
            InvalidArgument: there is no such lane, or there cannot be so many connections.
        """
        transport = Transport(
            server,
            retry_seconds,
            LocalLane(lane_wanted(lane), client_id, partial(find_lane, server)),
            bulk.Connections(server, default_connections() if connections is None else connections),
        )
        weakref.finalize(transport, transport.lane.close).atexit = False
        return transport

    def connections_to(self, address: str) -> bulk.Connections:
        """Connections for streams to a replica of the service; the empty address stands for that of `server`."""
        if not address:
            return self.connections
        made = bulk.Connections(address, self.connections.most)
        return self.replicas.setdefault(address, made)  # one that is not used has connected to nothing

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are gone."""
        self.lane.close()
        for connections in (self.connections, *self.replicas.values()):
            connections.close()


def find_lane(server: str) -> local_lane_pb2.GetLocalLaneResponse:
    """Where the service's socket is, as it says itself."""
    with rpc.open_channel(server) as channel, rpc.translated_errors(server):
        stub = local_lane_pb2_grpc.LocalLaneServiceStub(channel)
        return stub.GetLocalLane(local_lane_pb2.GetLocalLaneRequest(), timeout=_LANE_SECONDS)
