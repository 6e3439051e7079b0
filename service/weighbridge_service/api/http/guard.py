"""Guard of the HTTP server against requests that a browser sends because of pages of other sites.

Another site can make a browser inside the network send requests to the service: through a domain that its owner points
at the service's address (DNS rebinding), or through a form on a page of another origin. Cookies cannot identify such
requests, because the API does not use cookies (only pages accept one). So the guard checks headers: `Host` must be a
name that an outsider cannot own, or one that the operator has configured, and a request that changes something must not
have an `Origin` of another site. Programs do not send `Origin`.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge_service.api.http.problems import ProblemResponse

PAGE = "weighbridge-page"
"""Key in the scope of requests to routes of pages."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".cluster.local", ".home.arpa")
"""Suffixes of names that public DNS does not resolve."""
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'"
_DOCUMENTATION = (
    "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self'"
)
_PAGES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Referrer-Policy": "same-origin",  # without a referrer, browsers also omit the origin of forms
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a request.

    Attributes:
        reason: identifier, in capitals.
        status: HTTP status.
        detail: description of the problem.
        fix: remedy for the caller.
    """

    reason: str
    status: int
    detail: str
    fix: str


@dataclass(frozen=True, slots=True)
class HostNames:
    """Names that the ``Host`` header may have. IP addresses and private names are always allowed.

    Attributes:
        named: further allowed names, in lower case; ``*`` allows all.
    """

    named: frozenset[str]

    @staticmethod
    def of(names: Iterable[str]) -> HostNames:
        """These names, and this machine's own."""
        own = (socket.gethostname(), socket.getfqdn())
        return HostNames(frozenset(name.lower().rstrip(".") for name in (*names, *own) if name))

    def allow(self, host: str) -> bool:
        """Whether ``host``, the value of a `Host` header, is allowed."""
        if "*" in self.named:
            return True
        name = _name_of(host)
        if name is None:
            return False
        if "." not in name or name.endswith(_PRIVATE_SUFFIXES) or name in self.named:
            return True
        return _is_address(name)


def refusal(method: str, headers: Headers, names: HostNames) -> Refusal | None:
    """The refusal of a request; None if the request is allowed.

    Args:
        method: method of the request.
        headers: headers of the request.
        names: allowed names of the service.
    """
    host = headers.get("host")
    if host is not None and not names.allow(host):
        return Refusal(
            "HOST_NOT_ALLOWED",
            421,
            f"{host[:80]!r} is not a name of this service",
            "use its address, or start the service with --http-host and this name",
        )
    origin = headers.get("origin")
    if method not in _READING and origin is not None and _authority_of(origin) != host:
        return Refusal(
            "CROSS_ORIGIN",
            403,
            f"a page of {origin[:80]!r} may not change anything in this service",
            "use the service's own pages, or a client program",
        )
    return None


def _name_of(host: str) -> str | None:
    """The name in a `Host` header, without the port; None if the header has no name."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _authority_of(origin: str) -> str:
    """Host and port of an origin; empty if the origin does not contain them."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Middleware that refuses cross-site requests, and adds security headers to responses.

    Args:
        app: the wrapped application.
        names: allowed names of the service.
        documentation: path of the API documentation. It is the only page that may run inline scripts.
    """

    def __init__(self, app: ASGIApp, names: HostNames, documentation: str) -> None:
        self._app = app
        self._names = names
        self._documentation = documentation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = refusal(scope["method"], Headers(scope=scope), self._names)
        if scope["path"] == self._documentation and refused is None:
            await self._app(scope, receive, _Page(send).send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                if PAGE in scope:
                    _guard(message, _PAGES, _HEADERS | _PAGE_HEADERS)
                else:
                    _guard(message, _NOTHING)
            await send(message)

        if refused is None:
            await self._app(scope, receive, guarded)
        else:
            answer = ProblemResponse(refused.reason, refused.status, refused.detail, fix=refused.fix)
            await answer(scope, receive, guarded)


class _Page:
    """A page that is sent only when it is complete, so that its headers can contain hashes of its scripts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False) or self._start is None:
            return
        scripts = "".join(
            f" 'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
            for script in _INLINE_SCRIPT.findall(self._body)
        )
        _guard(self._start, _DOCUMENTATION + scripts)
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})


def _guard(start: Message, policy: str, others: Mapping[str, str] = _HEADERS) -> None:
    headers = MutableHeaders(scope=start)
    headers["Content-Security-Policy"] = policy
    for name, value in others.items():
        headers[name] = value
