"""Connections to other replicas, for what they tell each other and for the files that they read from each other."""

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
"""For a part of a file, of some megabytes."""
_PROBE_SECONDS = 1.0


class Links:
    """Connections to other replicas, made when first used. Thread-safe.

    Args:
        home: this process.
        credentials: what it shows to others.
        left: is called with a replica whose answer names it as one that stops.

    Attributes:
        leaving: whether each exchange tells the other replica that this process stops.
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
        """Tell another replica how far this one is.

        Args:
            other: which replica.
            progress: with each version, and whether to name the files that were written.
            engines: what agents have reported to this one.
            leaving: tell it that this process stops, before the attribute `leaving` is set.

        Returns:
            The replica that has answered, which may be another process at the same address, and how far it is: with ``leaving``, with all
            versions that it receives together with this one.

        Raises:
            WeighbridgeError: it cannot be reached, or refuses.
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
        """Returns when another replica has taken a version over.

        Args:
            other: which replica.
            request: which version; its sender is filled in.
            seconds: how long that may take.

        Raises:
            WeighbridgeError: it refuses, cannot be reached, or takes too long.
        """
        request.sender.CopyFrom(home_to_proto(self.home))
        stub = replica_service_pb2_grpc.ReplicaServiceStub(self._to(other.address).control(other.address))
        with rpc.translated_errors(other.address, self._credentials):
            stub.TakeOver(parts(request), timeout=seconds)

    def read_file(self, owner: Home, key: tuple[str, int, str], file: str, offset: int, length: int) -> bytes:
        """A part of a file from the image of the replica that owns it.

        Args:
            owner: that replica.
            key: model, number and claim of the version.
            file: its name.
            offset: first byte.
            length: how many.

        Raises:
            DataLoss: a piece does not agree with its checksum, or bytes are missing.
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
        request = pb.ReadFileRequest(
            model=model, number=number, claim=claim, file=file, offset=offset, length=length
        )
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
        """End all connections; what is on its way fails."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for each in connections.values():
            each.close()

    def _to(self, address: str) -> bulk.Connections:
        with self._lock:
            # a heartbeat must not queue behind a megabyte, so streams have a connection of their own
            return self._connections.setdefault(
                address, bulk.Connections(Addresses([address]), 1, self._credentials)
            )


def refuses(address: str) -> bool:
    """Whether a machine says that nobody listens at an address: a process that was there has ended."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
