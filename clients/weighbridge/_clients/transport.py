"""Transport of one client's weights: memory that it shares with the service, and connections for streams."""

from __future__ import annotations

import functools
import os
import threading
import uuid
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TypedDict

from weighbridge._core.striping import default_connections
from weighbridge._lane.local_lane import LocalLane, lane_wanted
from weighbridge._transport import bulk, rpc
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.credentials import NONE, Credentials
from weighbridge.errors import Unavailable
from weighbridge.v1 import local_lane_pb2, local_lane_pb2_grpc

__all__ = ["ConnectionOptions"]

_LANE_SECONDS = 5.0


class ConnectionOptions(TypedDict, total=False):
    """What every client takes besides the service's address.

    Attributes:
        retry_seconds: how long to keep trying when the service cannot be reached, or has no room; by default 60.
        lane: how weights travel: ``local`` by memory that is shared with the service, ``grpc`` by its gRPC face, ``auto`` by the
            first if this process runs on the service's machine and by the second otherwise. By default ``WEIGHBRIDGE_LANE``, or
            ``auto``.
        connections: over how many connections a stream of 64 MiB or more is spread, 1 to 16; by default two, or one on a
            machine with fewer than four processors. All other calls have a connection of their own.
        credentials: certificates and token; by default what the environment says: ``WEIGHBRIDGE_CA``, ``WEIGHBRIDGE_TOKEN`` and others
            (`Credentials`).
    """

    retry_seconds: float
    lane: str | None
    connections: int | None
    credentials: Credentials | None


class Transport:
    """What carries one client's weights. Connects when first used; thread-safe.

    Args:
        server: addresses of the service, separated by commas; None for the default.
        retry_seconds, lane, connections, credentials: see `ConnectionOptions`.

    Attributes:
        addresses: where the service is reached, and which address is in use.
        retry_seconds: as given.
        client_id: the name of this client in its requests; of clients in one process it begins alike, up to a slash.
        credentials: of all connections.
        streams: connections for streams from whichever address is in use.

    Raises:
        InvalidArgument: there is no such port or lane, or there cannot be so many connections.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        retry_seconds: float = 60.0,
        lane: str | None = None,
        connections: int | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.addresses = addresses = Addresses.of(server)
        self.credentials = proofs = Credentials.from_environment() if credentials is None else credentials
        self.retry_seconds = retry_seconds
        self.client_id = f"{_process_id(os.getpid())}/{uuid.uuid4()}"
        self._wanted_lane = lane_wanted(lane)
        self._lanes: dict[str, LocalLane] = {}
        most = default_connections() if connections is None else connections
        self.streams = bulk.Connections(addresses, most, proofs)
        self._lock = threading.Lock()
        self._streams_to: dict[str, bulk.Connections] = {}
        weakref.finalize(self, _close_lanes, self._lanes).atexit = False

    @property
    def lane(self) -> LocalLane:
        """The local lane of the replica in use."""
        return self.lane_at(self.addresses.current)

    def lane_at(self, address: str) -> LocalLane:
        """The local lane of one replica: it lends memory of versions that were opened there."""
        with self._lock:
            made = self._lanes.get(address)
            if made is None:
                if self.streams.closed:
                    raise Unavailable("the client has been closed")
                find = partial(find_faces, address, self.credentials)
                made = self._lanes[address] = LocalLane(self._wanted_lane, self.client_id, find)
            return made

    def streams_to(self, address: str) -> bulk.Connections:
        """Connections for streams to one address and no other: a push stays with the replica at which it was opened."""
        if self.addresses.all == (address,):
            return self.streams
        with self._lock:
            if self.streams.closed:
                raise Unavailable("the client has been closed")
            made = self._streams_to.get(address)
            if made is None:
                made = bulk.Connections(Addresses([address]), self.streams.most, self.credentials)
                self._streams_to[address] = made
            return made

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are gone."""
        self.streams.close()
        with self._lock:  # nothing is made from here on
            made, lanes = list(self._streams_to.values()), dict(self._lanes)
        _close_lanes(lanes)
        for connections in made:
            connections.close()


@functools.cache
def _process_id(pid: int) -> str:
    """The name of a process; another one in a process that was forked."""
    return f"{uuid.uuid4()}.{pid}"


def _close_lanes(lanes: Mapping[str, LocalLane]) -> None:
    for lane in list(lanes.values()):
        lane.close()


def find_faces(address: str, credentials: Credentials = NONE) -> local_lane_pb2.GetLocalLaneResponse:
    """Where else a service answers, at its socket and by HTTP, as it says itself at one of its addresses for gRPC."""
    with rpc.open_channel(address, credentials) as channel, rpc.translated_errors(address, credentials):
        stub = local_lane_pb2_grpc.LocalLaneServiceStub(channel)
        return stub.GetLocalLane(local_lane_pb2.GetLocalLaneRequest(), timeout=_LANE_SECONDS)
