"""Callers of the HTTP face: what a request shows, whose it is, whether they may, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from weighbridge_service.access.audit import Audit, noting
from weighbridge_service.access.identities import EVERYBODY, Evidence, Identity
from weighbridge_service.access.peer import LOCAL, Peer, authorize

CERTIFICATE = "weighbridge-certificate"
"""Key of the names in a connection's certificate, in the state of its requests."""
SHOWN = "weighbridge-shown"
"""Key of what a browser has shown in the form of a page, in the scope of requests for pages; empty or missing if it has not."""
_HEADER = "authorization"
_ASKED = "weighbridge-asked"
"""Key of what a request has asked for, in its scope."""
_RESULTS = {401: Unauthenticated.reason, 403: PermissionDenied.reason, 429: ResourceExhausted.reason}


class _Asked(NamedTuple):
    """What a request has asked for last."""

    peer: Peer
    route: str
    verb: Verb
    model: str
    ref: str


def ask(request: Request, verb: Verb, model: str = "", ref: str = "") -> None:
    """Raise if the caller may not do this, or it cannot be written down; see `authorize` and `Audit.check`. How it ends is written down."""
    peer = peer_of(request)
    request.scope[_ASKED] = _Asked(peer, request.scope["route"].name, verb, model, ref)
    authorize(peer, verb, model, ref)
    request.app.state.audit.check(verb)


class Standing:
    """Whether what has let a request in does so still: asked now and then while a long response is sent.

    Args:
        request: which one.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._seconds = request.app.state.access.standing_seconds
        asked = request.scope.get(_ASKED)
        # the identity that was let in: the policy may have changed since
        self._identity: Identity = _identity(request) if asked is None else asked.peer.identity
        self._stood = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether its token has expired, or the policy has changed. Its client asks again, from where it was."""
        now = time.monotonic()
        if self._identity is EVERYBODY or now - self._stood < self._seconds:
            return False
        self._stood = now
        return _identity(self._request) != self._identity


class Recorder:
    """Writes down and counts how requests end that have asked whether they may.

    Args:
        app: what answers.
        audit: where it is written down.
        count: is told the route, the status, and the seconds until the answer began.
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
    """Who has sent a request."""
    client = request.client
    identity = _identity(request)
    return Peer(client.host, str(client.port), identity) if client else Peer(LOCAL, "", identity)


def came_by_tls(request: Request) -> bool:
    """Whether the caller's own connection is under TLS: here, or at a proxy that says so in ``X-Forwarded-Proto``.

    It decides how links and cookies are made for this caller. The header can only make them stricter, so it counts from everybody.
    """
    # of several proxies, the first is the caller's
    said, _, _ = request.headers.get("x-forwarded-proto", "").partition(",")
    return request.url.scheme == "https" or said.strip().lower() == "https"


def _identity(request: Request) -> Identity:
    access = request.app.state.access
    if access.open:
        return EVERYBODY
    names: tuple[str, ...] = request.scope.get("state", {}).get(CERTIFICATE, ())
    shown = request.headers.getlist(_HEADER) or [each for each in (request.scope.get(SHOWN),) if each]
    found: Identity = access.identify(Evidence.of_call(shown, names))
    return found
