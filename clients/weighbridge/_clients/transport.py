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
    """Options of every client, in addition to the service's address.

    Attributes:
        retry_seconds: seconds for which a call is retried while the service is unreachable or has no capacity left; by
            default 60.
        lane: lane of weights: ``local`` uses memory shared with the service, ``grpc`` uses its gRPC server, and
            ``auto`` selects ``local`` if this process runs on the service's machine and ``grpc`` otherwise. By default
            ``WEIGHBRIDGE_LANE``, or ``auto``.
        connections: number of connections over which a stream of 64 MiB or more is spread, 1 to 16; by default two, or
            one on a machine with fewer than four processors. All other calls use a separate connection.
        credentials: certificates and token; by default those in ``WEIGHBRIDGE_CA``, ``WEIGHBRIDGE_TOKEN`` and other
            environment variables (`Credentials`).
    """

    retry_seconds: float
    lane: str | None
    connections: int | None
    credentials: Credentials | None


class Transport:
    """Lanes and connections that transfer one client's weights. It connects when it is first used, and is thread-safe.

    Args:
        server: addresses of the service, separated by commas; None for the default.
        retry_seconds, lane, connections, credentials: see `ConnectionOptions`.

    Attributes:
        addresses: addresses of the service, with the one in use.
        retry_seconds: see `ConnectionOptions`.
        client_id: ID of this client in its requests. The IDs of all clients of a process have the same prefix up to a
            slash.
        credentials: credentials of all connections.
        streams: connections for streams from the address in use.

    Raises:
        InvalidArgument: the port or lane does not exist, or the number of connections is out of range.
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
        """The local lane of one replica, which grants memory of versions that were opened there."""
        with self._lock:
            made = self._lanes.get(address)
            if made is None:
                if self.streams.closed:
                    raise Unavailable("the client has been closed")
                find = partial(find_faces, address, self.credentials)
                made = self._lanes[address] = LocalLane(self._wanted_lane, self.client_id, find)
            return made

    def streams_to(self, address: str) -> bulk.Connections:
        """Return connections for streams to one address only, because a push stays with the replica at which it was
        opened.
        """
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
        """Close all connections. Tensors that are views of a version stay valid until they are garbage-collected."""
        self.streams.close()
        with self._lock:  # `lane_at` and `streams_to` raise from here on
            made, lanes = list(self._streams_to.values()), dict(self._lanes)
        _close_lanes(lanes)
        for connections in made:
            connections.close()


@functools.cache
def _process_id(pid: int) -> str:
    """Return the ID of a process. A forked process has a different ID."""
    return f"{uuid.uuid4()}.{pid}"


def _close_lanes(lanes: Mapping[str, LocalLane]) -> None:
    for lane in list(lanes.values()):
        lane.close()


def find_faces(address: str, credentials: Credentials = NONE) -> local_lane_pb2.GetLocalLaneResponse:
    """Return the other endpoints of a service, its local socket and its HTTP address, from its response at one of its
    gRPC addresses.
    """
    with rpc.open_channel(address, credentials) as channel, rpc.translated_errors(address, credentials):
        stub = local_lane_pb2_grpc.LocalLaneServiceStub(channel)
        return stub.GetLocalLane(local_lane_pb2.GetLocalLaneRequest(), timeout=_LANE_SECONDS)
