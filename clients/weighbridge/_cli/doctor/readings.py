"""Readings of doctor: of connections to a service, of its local socket, and of this machine's packages and shared
memory.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import ssl
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from weighbridge._cli.doctor.checks import (
    CertificateReading,
    LaneReading,
    PortReading,
    SharedMemoryReading,
)
from weighbridge._cli.doctor.releases import SUPPORTED
from weighbridge._transport.credentials import Credentials
from weighbridge.errors import WeighbridgeError

_CONNECT_SECONDS = 3.0
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def read_port(address: str, what: str) -> PortReading:
    """Connect to an address."""
    begun = time.monotonic()
    try:
        socket.create_connection(host_and_port(address), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return PortReading(address, what, getattr(error, "strerror", None) or str(error))
    return PortReading(address, what, seconds=time.monotonic() - begun)


def read_certificate(address: str, credentials: Credentials) -> CertificateReading:
    """Make a TLS handshake with the server at an address, as a client with these credentials does."""
    host, port = host_and_port(address)
    context = credentials.for_https()
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection((host, port), _CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            found = wrapped.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return CertificateReading(address, error.verify_message or str(error))
    except OSError as error:
        return CertificateReading(address, getattr(error, "reason", None) or error.strerror or str(error))
    alternatives = found.get("subjectAltName", ())
    names = tuple(str(value) for entry in alternatives if isinstance(entry, tuple) for value in entry[1:])
    return CertificateReading(address, expires_s=float(ssl.cert_time_to_seconds(str(found["notAfter"]))), names=names)


def read_lane(address: str, credentials: Credentials) -> LaneReading:
    """Request the path of a service's local socket, and connect to it.

    Raises:
        WeighbridgeError: the request to the service failed.
    """
    from weighbridge._clients.transport import find_faces

    found = find_faces(address, credentials)
    here = _is_here(address)
    if not found.socket:
        return LaneReading("", found.unavailable, same_host=here)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(found.socket)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            return LaneReading(found.socket, same_host=here, error=error.strerror or str(error), missing=missing)
    return LaneReading(found.socket, same_host=here)


def read_bulk_port(address: str, credentials: Credentials) -> PortReading | None:
    """Connect to a service's port for streams of weights; None if streams have no separate port, or the service is
    unreachable.
    """
    from weighbridge._transport import rpc
    from weighbridge.v1 import bulk_service_pb2, bulk_service_pb2_grpc

    try:
        with rpc.open_channel(address, credentials) as channel, rpc.translated_errors(address, credentials):
            stub = bulk_service_pb2_grpc.BulkServiceStub(channel)
            found = stub.GetTicket(bulk_service_pb2.GetTicketRequest(), timeout=_CONNECT_SECONDS)
    except WeighbridgeError:
        return None
    host, _ = host_and_port(address)
    return read_port(f"{host}:{found.port}", "streams of weights") if found.port else None


def read_releases() -> Iterator[tuple[str, str]]:
    """Name and version of the packages of `SUPPORTED` that are installed. None of them is imported."""
    for package in SUPPORTED:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def read_shared_memory() -> SharedMemoryReading:
    """Allocate one huge page of shared memory, as a service does, and release it."""
    from weighbridge._memory import paging

    kernel, policy = platform.release(), _policy()
    try:
        descriptor = os.memfd_create("weighbridge-doctor")
    except OSError as error:
        return SharedMemoryReading(kernel, shared=error.strerror or str(error), policy=policy)
    try:
        os.ftruncate(descriptor, paging.HUGE_PAGE)
        mapped, offset = paging.map_aligned(
            descriptor, paging.HUGE_PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        address = paging.address_of(mapped) + offset
        mapped[offset] = 1  # creates one small page to collapse
        huge = _refusal(address, paging.COLLAPSE)
        ahead = _refusal(address, paging.POPULATE_WRITE)
        return SharedMemoryReading(kernel, ahead=ahead, huge=huge, policy=policy)
    finally:
        os.close(descriptor)


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ValueError if the string has a different form."""
    host, _, port = address.rpartition(":")
    return host.rpartition("/")[2].strip("[]"), int(port)


def _refusal(address: int, advice: int) -> str:
    """Reason why the kernel refuses a huge page advice (madvise); empty if it accepts it."""
    from weighbridge._memory import paging

    try:
        paging.advise(address, paging.HUGE_PAGE, advice)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _policy() -> str:
    try:
        return _POLICY.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _is_here(address: str) -> bool:
    """Whether an address belongs to this machine."""
    host, _ = host_and_port(address)
    try:
        with socket.create_connection(host_and_port(address), _CONNECT_SECONDS) as connection:
            return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:
        return host in ("localhost", "127.0.0.1", "::1")
