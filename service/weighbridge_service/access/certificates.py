"""Certificates of the service, reloaded when their files change, so that they can be renewed while it runs."""

from __future__ import annotations

import functools
import logging
import re
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from weighbridge.errors import InvalidArgument
from weighbridge_service.runtime.tls_files import TlsFiles

log = logging.getLogger(__name__)

_KNOWN_CERTIFICATES = 4096
"""Size of the cache of client certificates.

Parsing one takes about 0.1 ms, and each call of a connection presents it.
"""
_DNS_NAME = re.compile(r"[A-Za-z0-9*_.-]+")


@dataclass(frozen=True, slots=True)
class _Content:
    certificate: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """The certificate of a service, reloaded when its files change. Thread-safe.

    Args:
        files: paths of the certificate, its key and the authority of clients.

    Raises:
        InvalidArgument: a file cannot be read, or a key does not belong to its certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp = self._stamped()
        self._content = self._read()
        self._context = self._made_context()

    @property
    def asks_clients(self) -> bool:
        """Whether clients are asked for certificates."""
        return self._files.client_ca is not None

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC port. If clients are asked for certificates, gRPC requires one."""
        served = self._content

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            found = self._current()
            if found is served:
                return None
            served = found
            return _configuration(found)

        fetch: Any = renewed  # None is allowed, whatever its annotation says
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(served), fetch, require_client_authentication=self.asks_clients
        )
        return credentials

    def for_http(self) -> ssl.SSLContext:
        """TLS context for an HTTP port. A client's certificate is optional here, because probes have none."""
        listening = self._made_context()

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            self._current()
            connection.context = self._context

        listening.sni_callback = renew  # called for each connection, also without a server name
        return listening

    def _current(self) -> _Content:
        with self._lock:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._stamp = stamp
                before = self._content
                try:
                    self._content = self._read()
                    self._context = self._made_context()
                    log.info("the certificate %s was read again", self._files.certificate)
                except InvalidArgument as error:  # files are replaced one after the other
                    self._content = before
                    log.warning("the certificate stays as it was: %s", error)
            return self._content

    def _stamped(self) -> tuple[int, ...]:
        found = []
        for path in (self._files.certificate, self._files.key, self._files.client_ca):
            try:
                found.append(path.stat().st_mtime_ns if path is not None else 0)
            except OSError:
                found.append(-1)
        return tuple(found)

    def _read(self) -> _Content:
        def read(path: Path) -> bytes:
            try:
                return path.read_bytes()
            except OSError as error:
                raise InvalidArgument(
                    f"{path} cannot be read: {error.strerror}", fix="let the service's user read it"
                ) from error

        ca = self._files.client_ca
        return _Content(read(self._files.certificate), read(self._files.key), None if ca is None else read(ca))

    def _made_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = self._files
        try:
            context.load_cert_chain(files.certificate, files.key)
            if files.client_ca is not None:
                context.load_verify_locations(files.client_ca)
                context.verify_mode = ssl.CERT_OPTIONAL
                # no session resumption: a resumed session keeps the client's certificate of its first handshake, even
                # if that certificate has expired or its authority is not trusted any more
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"{files.certificate} and {files.key} cannot be used for TLS: {error}",
                fix="name a certificate and its own private key, both PEM and without a password",
            ) from error
        return context


def _configuration(content: _Content) -> grpc.ServerCertificateConfiguration:
    configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], root_certificates=content.client_ca
    )
    return configuration


def names_from_grpc(context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names in the certificate of a gRPC caller, from the authentication context of its connection; see `names_in`.

    gRPC's own list of names mixes names of all kinds, and truncates each at its first NUL.
    """
    return names_in(b"".join(context.get("x509_pem_cert", ())))


def names_from_tls(peer_certificate: bytes | None) -> tuple[str, ...]:
    """The names in a certificate in DER form, as `ssl` returns it; see `names_in`. Empty without a certificate."""
    return names_in(ssl.DER_cert_to_PEM_cert(peer_certificate).encode() if peer_certificate else b"")


@functools.lru_cache(_KNOWN_CERTIFICATES)
def names_in(pem: bytes) -> tuple[str, ...]:
    """The names in a certificate that can identify its owner: DNS names, URIs and addresses, or the common name if it
    has none of these.

    E-mail addresses do not count, since an authority may let people choose theirs. DNS names with other characters than
    those of host names, and URIs without a colon, are dropped, so that a name of one kind cannot pass for one of
    another kind.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        alternatives = _alternatives(certificate)
    except ValueError:  # no certificate, or a malformed one
        return ()
    hosts = alternatives.get_values_for_type(x509.DNSName)
    uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier)
    addresses = alternatives.get_values_for_type(x509.IPAddress)
    if not (hosts or uris or addresses):
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return tuple(str(each.value) for each in common)
    return (
        *(host for host in hosts if _DNS_NAME.fullmatch(host)),
        *(uri for uri in uris if ":" in uri),
        *map(str, addresses),
    )


def _alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName(())
