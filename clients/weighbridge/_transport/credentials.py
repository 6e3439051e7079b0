"""Credentials of a client: how it verifies the service, and how it authenticates to it.

They become part of a channel when it is made, so that no call is made without them.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from weighbridge.errors import InvalidArgument

__all__ = ["Credentials"]

CA_VARIABLE = "WEIGHBRIDGE_CA"
CERTIFICATE_VARIABLE = "WEIGHBRIDGE_CERT"
KEY_VARIABLE = "WEIGHBRIDGE_KEY"
TOKEN_VARIABLE = "WEIGHBRIDGE_TOKEN"  # noqa: S105  # a name
TOKEN_FILE_VARIABLE = "WEIGHBRIDGE_TOKEN_FILE"  # noqa: S105  # a name
INSECURE_VARIABLE = "WEIGHBRIDGE_INSECURE"

AUTHORIZATION = "authorization"
"""Key of the token in a call's metadata: ``Bearer TOKEN``."""
SYSTEM = "system"
"""Value in place of a file of authorities: the authorities that the machine trusts."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client. Files are read when a connection is made; the token's file on every call.

    Attributes:
        ca: file of certificate authorities (PEM), one of which has issued the service's certificate; ``system`` for
            those that this machine trusts. None connects to the service without TLS.
        certificate: file of this client's certificate and its chain (PEM), for services that require one.
        key: file of its private key (PEM).
        token: bearer token by which the service identifies this client, or a function that returns it.
        token_file: file that contains the token; it may be replaced at any time, as Kubernetes does with mounted
            service account tokens.
        insecure: whether the token may be sent to other machines without TLS.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    token_file: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument(
                "a client's certificate needs its private key, and the other way round",
                fix=f"name both, {CERTIFICATE_VARIABLE} and {KEY_VARIABLE}",
            )
        if self.certificate is not None and self.ca is None:
            raise InvalidArgument(
                "a client's certificate can only be presented over TLS",
                fix=f"name the authority of the service's certificate: set {CA_VARIABLE} to a file or to {SYSTEM}",
            )
        if self.token is not None and self.token_file is not None:
            raise InvalidArgument("token and token_file are both set", fix="set one of them")

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Credentials:
        """Credentials from environment variables: ``WEIGHBRIDGE_CA``, ``_CERT``, ``_KEY``, ``_TOKEN``, ``_TOKEN_FILE``,
        ``_INSECURE``.
        """
        found = os.environ if environment is None else environment

        def of(name: str) -> str | None:
            return found.get(name) or None

        return Credentials(
            of(CA_VARIABLE),
            of(CERTIFICATE_VARIABLE),
            of(KEY_VARIABLE),
            of(TOKEN_VARIABLE),
            of(TOKEN_FILE_VARIABLE),
            of(INSECURE_VARIABLE) == "1",
        )

    @property
    def has_token(self) -> bool:
        """Whether calls carry a token."""
        return self.token is not None or self.token_file is not None

    def bearer(self) -> tuple[str, str]:
        """The metadata with the token. Raises InvalidArgument if the token cannot be read or sent."""
        if self.token_file is not None:
            token = _read(self.token_file, "the token").decode("utf-8", "replace").strip()
        else:
            token = (self.token() if callable(self.token) else self.token or "").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            where = self.token_file or TOKEN_VARIABLE
            raise InvalidArgument(
                f"what {where} contains is not a token: it is empty, or has characters that tokens cannot have",
                fix="write the token there, and nothing else",
            )
        return AUTHORIZATION, f"Bearer {token}"

    def stamp(self) -> tuple[int, ...]:
        """Value that changes with the TLS files: earlier connections keep what they read."""
        return tuple(_changed(each) for each in (self.ca, self.certificate, self.key) if each is not None)

    def check_address(self, server: str) -> None:
        """Raise InvalidArgument if the token would be sent over the network unencrypted."""
        if not self.has_token or self.ca is not None or self.insecure or stays_here(server):
            return
        raise InvalidArgument(
            f"the token would be sent to {server} without TLS, and anyone on the way could read it",
            fix=(
                f"name the authority of the service's certificate ({CA_VARIABLE}), or set "
                f"{INSECURE_VARIABLE}=1 in a network that you trust"
            ),
        )

    def tls(self) -> grpc.ChannelCredentials | None:
        """Credentials of a channel with TLS; None without.

        Raises:
            InvalidArgument: a file cannot be read.
        """
        if self.ca is None:
            return None
        roots = None if self.ca == SYSTEM else _read(self.ca, "the file of authorities")
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        return grpc.ssl_channel_credentials(
            roots, _read(self.key, "the private key"), _read(self.certificate, "the certificate")
        )

    def for_https(self) -> ssl.SSLContext:
        """TLS context of a connection to the service's HTTP API.

        Raises:
            InvalidArgument: a file cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=None if self.ca in (None, SYSTEM) else self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise InvalidArgument(
                f"{self.ca} or {self.certificate} cannot be used for TLS: {error}", fix="name files in PEM"
            ) from error
        return context


NONE = Credentials()
"""Credentials of a client without a token and without TLS."""


def with_token(channel: grpc.Channel, credentials: Credentials) -> grpc.Channel:
    """A channel whose calls carry the token."""
    return grpc.intercept_channel(channel, _Bearer(credentials)) if credentials.has_token else channel


def async_token(credentials: Credentials) -> list[grpc.aio.ClientInterceptor]:
    """Interceptors that add the token to the calls of a channel for asyncio."""
    if not credentials.has_token:
        return []
    kinds: tuple[Any, ...] = (_AsyncUnary, _AsyncUnaryStream, _AsyncStreamUnary)
    return [kind(credentials) for kind in kinds]


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{what} {path} cannot be read: {error.strerror}",
            fix="let this user read it, or name another file",
        ) from error


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def stays_here(server: str) -> bool:
    """Whether an address is a loopback address of this machine."""
    if server.startswith("unix:"):
        return True
    host = server.rpartition(":")[0].rpartition("/")[2].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Details(NamedTuple):
    """`grpc.ClientCallDetails` with other metadata."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any = None


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to each call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), self._credentials.bearer())
        return continuation(
            _Details(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    intercept_unary_unary = _intercept  # type: ignore[assignment]
    intercept_unary_stream = _intercept  # type: ignore[assignment]
    intercept_stream_unary = _intercept  # type: ignore[assignment]
    intercept_stream_stream = _intercept  # type: ignore[assignment]


class _AsyncBearer:
    """Adds the token to each call of a channel for asyncio."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._credentials.bearer())
        return await continuation(details._replace(metadata=metadata), request)


class _AsyncUnary(_AsyncBearer, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _AsyncBearer._intercept  # type: ignore[assignment]


class _AsyncUnaryStream(_AsyncBearer, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _AsyncBearer._intercept  # type: ignore[assignment]


class _AsyncStreamUnary(_AsyncBearer, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary = _AsyncBearer._intercept  # type: ignore[assignment]
