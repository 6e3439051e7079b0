"""Callers of the HTTP server: a request's credentials and identity, its authorization, and its record in the audit
log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from weighbridge_service.access.audit import Audit, noting
from weighbridge_service.access.identities import EVERYBODY, Identity, PresentedCredentials
from weighbridge_service.access.peer import LOCAL, Peer, authorize

CERTIFICATE = "weighbridge-certificate"
"""Key in the state of requests. The value is the names in the connection's certificate."""
SHOWN = "weighbridge-shown"
"""Key in the scope of requests for pages.

The value is the credential of the browser's session; empty or missing without a session.
"""
_HEADER = "authorization"
_ASKED = "weighbridge-asked"
"""Key in the scope of a request. The value is the request's last `_Asked`."""
_RESULTS = {401: Unauthenticated.reason, 403: PermissionDenied.reason, 429: ResourceExhausted.reason}


class _Asked(NamedTuple):
    """The last authorization that a request needed."""

    peer: Peer
    route: str
    verb: Verb
    model: str
    ref: str


def ask(request: Request, verb: Verb, model: str = "", ref: str = "") -> None:
    """Raise if the caller may not do this, or if the audit log cannot record it; see `authorize` and `Audit.check`.

    `Recorder` records the result.
    """
    peer = peer_of(request)
    request.scope[_ASKED] = _Asked(peer, request.scope["route"].name, verb, model, ref)
    authorize(peer, verb, model, ref)
    request.app.state.audit.check(verb)


class CredentialsCheck:
    """Continued validity of a request's credentials, for periodic checks while a long response is sent.

    Args:
        request: the request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._seconds = request.app.state.access.standing_seconds
        asked = request.scope.get(_ASKED)
        # the identity that was authorized; the policy may have changed since
        self._identity: Identity = _identity(request) if asked is None else asked.peer.identity
        self._stood = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the token has expired or the policy has changed.

        The response then ends, and its client may resume with a new request.
        """
        now = time.monotonic()
        if self._identity is EVERYBODY or now - self._stood < self._seconds:
            return False
        self._stood = now
        return _identity(self._request) != self._identity


class Recorder:
    """Middleware that counts requests and records them in the audit log, if they reached authorization.

    Args:
        app: the wrapped application.
        audit: the audit log.
        count: receives route, status, and seconds until the response began.
    """

    def __init__(self, app: ASGIApp, audit: Audit, count: Callable[[str, int, float], None]) -> None:
        self._app = app
        self._audit = audit
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        status, begun, ended = 500, time.monotonic(), 0.0

        async def watching(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status, ended = message["status"], time.monotonic()
            await send(message)

        noted: dict[str, Any] = {}
        try:
            with noting(noted):
                await self._app(scope, receive, watching)
        finally:
            asked: _Asked | None = scope.get(_ASKED)
            if asked is not None:
                self._count(asked.route, status, (ended or time.monotonic()) - begun)
                self._audit.record(
                    face="http",
                    host=asked.peer.host,
                    identity=asked.peer.identity.name,
                    action=asked.route,
                    verb=asked.verb,
                    model=asked.model,
                    ref=asked.ref,
                    result="OK" if status < 400 else _RESULTS.get(status, f"HTTP {status}"),
                    noted=noted,
                )


def peer_of(request: Request) -> Peer:
    """The caller who sent a request."""
    client = request.client
    identity = _identity(request)
    return Peer(client.host, str(client.port), identity) if client else Peer(LOCAL, "", identity)


def came_by_tls(request: Request) -> bool:
    """Whether the caller's own connection uses TLS: to this service, or to a proxy that sets ``X-Forwarded-Proto``.

    Links and cookies for the caller depend on the result. The header can only make them stricter, so it is accepted
    from any sender.
    """
    # with several proxies, the first value is the caller's
    said, _, _ = request.headers.get("x-forwarded-proto", "").partition(",")
    return request.url.scheme == "https" or said.strip().lower() == "https"


def _identity(request: Request) -> Identity:
    access = request.app.state.access
    if access.open:
        return EVERYBODY
    names: tuple[str, ...] = request.scope.get("state", {}).get(CERTIFICATE, ())
    shown = request.headers.getlist(_HEADER) or [each for each in (request.scope.get(SHOWN),) if each]
    found: Identity = access.identify(PresentedCredentials.of_call(shown, names))
    return found
