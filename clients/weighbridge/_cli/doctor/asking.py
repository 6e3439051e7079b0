"""Requests to a service's HTTP address, as given or as reported by the service, with the credentials of the
environment.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weighbridge.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Unavailable

if TYPE_CHECKING:
    from weighbridge._transport.credentials import Credentials

_NAME_IT = "name its HTTP address: --http HOST:PORT, or WEIGHBRIDGE_HTTP"
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104  # nothing is bound
_LONGEST = 16 << 20
"""Maximum bytes of a response."""
_PART = 64 << 10


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: a service sends none, and the token must go only to the given address."""

    def redirect_request(self, *_: object) -> None:
        """Return None, which makes the redirect an error."""


def told_address(server: str, credentials: Credentials) -> str:
    """HTTP address that a service reports at its gRPC address. No other address receives a token.

    Raises:
        FailedPrecondition: the service reports none, or one that is reachable only from its own machine.
        WeighbridgeError: the service does not respond, or refuses.
    """
    from weighbridge._clients.transport import find_faces

    told = find_faces(server, credentials).http
    address = reached_at(told, server)
    if not address:
        what = (
            f"answers HTTP at {told}, which only its own machine can reach"
            if told
            else "does not report its HTTP address"
        )
        raise FailedPrecondition(f"the service at {server} {what}", fix=_NAME_IT)
    return address


def reached_at(told: str, server: str) -> str:
    """Address at which a client reaches an address that the service listens on; empty if it cannot.

    Args:
        told: ``host:port`` at which the service listens.
        server: ``host:port`` at which the client has reached it.
    """
    from weighbridge._transport.credentials import stays_here

    host, _, port = told.rpartition(":")
    if host.strip("[]") in _UNSPECIFIED:
        return f"{server.rpartition(':')[0]}:{port}"
    return "" if stays_here(told) and not stays_here(server) else told


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response.

    Attributes:
        value: the JSON document.
        url: the URL that was requested.
        said_s: the service's clock from the header ``Date``, Unix time in whole seconds; None without that header.
    """

    value: Any
    url: str
    said_s: float | None


def ask(address: str, path: str, seconds: float, credentials: Credentials | None = None) -> HttpResponse:
    """Request a path of a service over HTTP, and parse the JSON response.

    Args:
        address: ``host:port``, or a URL. Uses https if certificate authorities are configured.
        path: such as ``/v1/checks``.
        seconds: the timeout.
        credentials: those of the environment by default.

    Raises:
        InvalidArgument: ``address`` is not an HTTP address.
        PermissionDenied: the service does not permit this client to read it.
        Unavailable: nothing responds there, or the response does not come from a service.
    """
    if credentials is None:
        from weighbridge._transport.credentials import Credentials

        credentials = Credentials.from_environment()
    from weighbridge._transport.proxies import opener

    url = address if "://" in address else f"{'http' if credentials.ca is None else 'https'}://{address}"
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"{address[:80]!r} is not an HTTP address", fix="write it like 127.0.0.1:8080")
    request = urllib.request.Request(f"{url.rstrip('/')}{path}")  # noqa: S310  # checked above
    url = request.full_url
    if credentials.has_token:
        if url.startswith("http://"):
            credentials.check_address(request.host)
        request.add_header(*credentials.bearer())
    until_s = time.monotonic() + seconds
    tls = credentials.for_https() if url.startswith("https://") else None
    try:
        handlers = [] if tls is None else [urllib.request.HTTPSHandler(context=tls)]
        with opener(url, _NoRedirects(), *handlers).open(request, timeout=seconds) as response:
            return HttpResponse(json.loads(_read(response, url, until_s)), url, _date(response.headers.get("Date")))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionDenied(
                f"{url} answers {error.code}: it denies access",
                fix="set WEIGHBRIDGE_TOKEN to a token with the scope observe",
            ) from error
        raise Unavailable(
            f"{url} answers {error.code} {error.reason}", fix="is it a service of this release?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(
            f"{url} cannot be reached: {reason}", fix="is the service running, and is this its --http?"
        ) from error
    except ValueError as error:
        raise no_service(url) from error


def _read(response: http.client.HTTPResponse, url: str, until_s: float) -> bytes:
    """Read a response, with limits on its size and time, because the sender may be anything."""
    found = bytearray()
    while part := response.read1(_PART):
        found += part
        if len(found) > _LONGEST or time.monotonic() > until_s:
            raise no_service(url)
    return bytes(found)


def no_service(url: str) -> Unavailable:
    """Error for a response that does not come from a service."""
    return Unavailable(f"{url} does not answer like a service", fix="is this its --http?")


def address_of(url: str) -> str:
    """``host:port`` of a URL."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
