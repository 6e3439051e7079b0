"""Questions to a service's HTTP face, by what the environment says of credentials."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weighbridge.errors import InvalidArgument, PermissionDenied, Unavailable

if TYPE_CHECKING:
    from weighbridge._transport.credentials import Credentials

HTTP_PORT = 8080
DEFAULT_HTTP = f"127.0.0.1:{HTTP_PORT}"


def guessed_addresses(server: str) -> list[str]:
    """Where the HTTP face of a service may be whose gRPC addresses these are: at the default port of the same hosts."""
    hosts = [each.strip().rpartition(":")[0] for each in server.split(",")]
    return list(dict.fromkeys(f"{host}:{HTTP_PORT}" for host in hosts if host)) or [DEFAULT_HTTP]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        value: the JSON document.
        url: that was asked.
        said_s: what the service's clock said, Unix time in whole seconds; None if it did not.
    """

    value: Any
    url: str
    said_s: float | None


def ask(address: str, path: str, seconds: float, credentials: Credentials | None = None) -> Answer:
    """What a service answers.

    Args:
        address: ``host:port``, or a URL. By https where authorities are named.
        path: such as ``/v1/checks``.
        seconds: how long it may take.
        credentials: those of the environment by default.

    Raises:
        InvalidArgument: that is no address.
        PermissionDenied: it does not let this client look.
        Unavailable: none answers there, or what answers is none.
    """
    if credentials is None:
        from weighbridge._transport.credentials import Credentials

        credentials = Credentials.from_environment()
    url = address if "://" in address else f"{'http' if credentials.ca is None else 'https'}://{address}"
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"{address[:80]!r} is no HTTP address", fix="write it like 127.0.0.1:8080")
    request = urllib.request.Request(f"{url.rstrip('/')}{path}")  # noqa: S310  # checked above
    url = request.full_url
    if credentials.has_token:
        if url.startswith("http://"):
            credentials.check_address(request.host)
        request.add_header(*credentials.bearer())
    tls = credentials.for_https() if url.startswith("https://") else None
    try:
        with urllib.request.urlopen(request, timeout=seconds, context=tls) as response:  # noqa: S310  # likewise
            return Answer(json.load(response), url, _date(response.headers.get("Date")))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionDenied(
                f"{url} answers {error.code}: it does not let you look",
                fix="show a token that has the scope observe, in WEIGHBRIDGE_TOKEN",
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


def no_service(url: str) -> Unavailable:
    """That something answers that is no service."""
    return Unavailable(f"{url} does not answer as a service does", fix="is this its --http?")


def address_of(url: str) -> str:
    """``host:port`` of a URL."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
