"""Connections to other replicas, for the exchange of progress, for handovers, and for reading files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from weighbridge._transport import bulk, rpc
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.credentials import NONE, Credentials
from weighbridge._transport.pieces import decoder
from weighbridge._transport.request_parts import parts
from weighbridge.errors import DataLoss, Unavailable
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge.v1 import replica_service_pb2_grpc
from weighbridge_service.plan.declarations import Home
from weighbridge_service.replicas.progress import (
    Progress,
    home_from_proto,
    home_to_proto,
    progress_from_proto,
    progress_to_proto,
)

_EXCHANGE_SECONDS = 5.0
_READ_SECONDS = 30.0
"""Timeout for a part of a file, of some megabytes."""
_PROBE_SECONDS = 1.0


class Links:
    """Connections to other replicas, opened when first used. Thread-safe.

    Args:
        home: this process.
        credentials: credentials of this process.
        left: called with each replica whose response announces that it is stopping.

    Attributes:
        leaving: whether each exchange announces that this process is stopping.
    """

    def __init__(
        self, home: Home, credentials: Credentials = NONE, left: Callable[[Home], None] = lambda _: None
    ) -> None:
        self.home = home
        self.leaving = False
        self._left = left
        self._credentials = credentials
        self._lock = threading.Lock()
        self._connections: dict[str, bulk.Connections] = {}

    def exchange(
        self,
        other: Home,
        progress: Sequence[tuple[Progress, bool]] = (),
        engines: Sequence[pb.ReportedEngine] = (),
        *,
        leaving: bool = False,
    ) -> tuple[Home, list[Progress]]:
        """Send this replica's progress to another one.

        Args:
            other: the other replica.
            progress: progress of each part, and whether to include the written files.
            engines: reports of engines to forward.
            leaving: whether to announce that this process is stopping, even before the attribute `leaving` is set.

        Returns:
            The replica that responded, which may be another process at the same address, and its progress. With
            ``leaving``, the progress covers all versions that it shares with this replica.

        Raises:
            WeighbridgeError: the replica cannot be reached, or refuses.
        """
        stub = replica_service_pb2_grpc.ReplicaServiceStub(self._to(other.address).control(other.address))
        request = pb.ExchangeRequest(
            sender=home_to_proto(self.home),
            versions=[progress_to_proto(each, with_files=files) for each, files in progress],
            engines=engines,
            leaving=leaving or self.leaving,
        )
        with rpc.translated_errors(other.address, self._credentials):
            response = stub.Exchange(request, timeout=_EXCHANGE_SECONDS)
        found = [progress_from_proto(each) for each in response.versions]
        answered = home_from_proto(response.sender)
        if response.leaving:
            self._left(answered)
        return answered, [each for each in found if each is not None]

    def take_over(self, other: Home, request: pb.TakeOverRequest, seconds: float) -> None:
        """Ask another replica to take over a version, and wait until it has done so.

        Args:
            other: the other replica.
            request: the request; this method sets its sender.
            seconds: timeout.

        Raises:
            WeighbridgeError: the replica refuses, cannot be reached, or takes too long.
        """
        request.sender.CopyFrom(home_to_proto(self.home))
        stub = replica_service_pb2_grpc.ReplicaServiceStub(self._to(other.address).control(other.address))
        with rpc.translated_errors(other.address, self._credentials):
            stub.TakeOver(parts(request), timeout=seconds)

    def read_file(self, owner: Home, key: tuple[str, int, str], file: str, offset: int, length: int) -> bytes:
        """Read a part of a file from the image of the replica that owns it.

        Args:
            owner: replica that owns the file.
            key: model, number and claim of the version.
            file: name of the file.
            offset: first byte.
            length: number of bytes.

        Raises:
            DataLoss: a piece does not match its checksum, or bytes are missing.
            WeighbridgeError: the replica cannot be reached, or refuses.
        """
        model, number, claim = key
        connections = self._to(owner.address)
        way = connections.way(0)
        read: Any = way.channel.unary_stream(
            "/weighbridge.v1.ReplicaService/ReadFile",
            request_serializer=pb.ReadFileRequest.SerializeToString,
            response_deserializer=decoder(pb.ReadFileResponse),
        )
        request = pb.ReadFileRequest(model=model, number=number, claim=claim, file=file, offset=offset, length=length)
        found = bytearray()
        try:
            with rpc.translated_errors(owner.address, self._credentials):
                for piece in read(request, timeout=_READ_SECONDS, metadata=way.metadata):
                    found += rpc.checked(piece, offset + len(found))
        except Unavailable:
            connections.renew()
            raise
        if len(found) != length:
            raise DataLoss(f"{owner} sent {len(found)} of {length} bytes of {file} of {model}@{number}")
        return bytes(found)

    def close(self) -> None:
        """Close all connections. Calls in progress fail."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for each in connections.values():
            each.close()

    def _to(self, address: str) -> bulk.Connections:
        with self._lock:
            # streams use a separate connection, so that heartbeats do not queue behind megabytes of weights
            return self._connections.setdefault(address, bulk.Connections(Addresses([address]), 1, self._credentials))


def refuses(address: str) -> bool:
    """Whether the machine refuses connections to an address, which means that the process there has ended."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
