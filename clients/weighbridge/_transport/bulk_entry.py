"""Entry for streams of weights: the service's port for them, and the ticket that it requires there."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

import grpc

from weighbridge._transport import proxies, rpc
from weighbridge._transport.credentials import NONE, Credentials
from weighbridge.v1 import bulk_service_pb2, bulk_service_pb2_grpc

log = logging.getLogger(__name__)

TICKET = "weighbridge-ticket"
"""Key of the ticket in a call's metadata."""
_ASK_SECONDS = 10.0
_CONNECT_SECONDS = 2.0
_RENEW_AT = 0.75
"""Part of a ticket's lifetime after which it is renewed."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BulkEntry:
    """Address and ticket for streams.

    Attributes:
        server: the service's address that was asked.
        address: ``host:port`` for streams.
        metadata: metadata of their calls.
        until: when to ask again, in seconds of the monotonic clock.
    """

    server: str
    address: str
    metadata: Metadata
    until: float


def ask(control: grpc.Channel, server: str, credentials: Credentials = NONE) -> BulkEntry:
    """Request the entry from a service.

    Falls back to the service's known port if it names none, or names an unreachable one.

    Args:
        control: a channel to the service.
        server: its address.
        credentials: credentials of the channel.

    Raises:
        WeighbridgeError: the service is unreachable.
    """
    with rpc.translated_errors(server, credentials):
        stub = bulk_service_pb2_grpc.BulkServiceStub(control)
        found = stub.GetTicket(bulk_service_pb2.GetTicketRequest(), timeout=_ASK_SECONDS)
    until = time.monotonic() + found.valid_seconds * _RENEW_AT
    host, colon, _ = server.rpartition(":")
    # through a proxy, another port is another request, which a connection from here cannot test
    if not found.port or not colon or proxies.proxy_of(server, tls=credentials.ca is not None):
        return BulkEntry(server, server, (), until)
    address = f"{host}:{found.port}"
    if not _listens(host, found.port):
        log.warning(
            "the service takes weights at %s, which cannot be reached from here: they go over %s, which "
            "takes more processor time; open that port, or serve with --bulk-port off",
            address,
            server,
        )
        return BulkEntry(server, server, (), until)
    return BulkEntry(server, address, ((TICKET, found.ticket),), until)


def _listens(host: str, port: int) -> bool:
    name = host.rpartition("/")[2].removeprefix("[").removesuffix("]")
    try:
        with socket.create_connection((name, port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False
