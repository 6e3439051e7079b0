"""Browser sessions: the credential that a user submitted in the login form, by the id in a cookie.

Only pages accept the cookie, and they refuse forms that other sites submit. The API ignores cookies. A session stores
the credential instead of the identity: each request checks the policy again, so the session ends when the token is no
longer valid.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request, Response

from weighbridge_service.api.http.callers import came_by_tls

_COOKIE = "weighbridge"
_MOST = 4096
_MOST_OF_ONE = 32
_SECONDS = 12 * 3600.0
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Session:
    authorization: str = field(repr=False)
    name: str
    until: float


class Sessions:
    """The sessions of one process, at most `_MOST` in total and `_MOST_OF_ONE` for each identity. Thread-safe.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, authorization: str, name: str) -> str:
        """Begin a session and return its id.

        If the identity has too many sessions, its oldest is removed; if there are too many, the oldest of all.

        Args:
            authorization: the credential, as a value of the ``Authorization`` header.
            name: name of the identity.
        """
        made, now = secrets.token_urlsafe(_ID_BYTES), self._clock()
        with self._lock:
            for key in [key for key, each in self._sessions.items() if each.until <= now]:
                del self._sessions[key]
            own = [key for key, each in self._sessions.items() if each.name == name]
            for key in own[: max(0, len(own) - _MOST_OF_ONE + 1)]:
                del self._sessions[key]
            while len(self._sessions) >= _MOST:
                self._sessions.popitem(last=False)
            self._sessions[made] = _Session(authorization, name, now + _SECONDS)
        return made

    def authorization(self, session: str) -> str:
        """The credential of a session; empty if the session does not exist or has expired."""
        with self._lock:
            found = self._sessions.get(session)
        return found.authorization if found is not None and found.until > self._clock() else ""

    def end(self, session: str) -> None:
        """End a session, if it exists."""
        with self._lock:
            self._sessions.pop(session, None)


def session_in(request: Request) -> str:
    """The session id in a request's cookie; empty if the request has no cookie."""
    return request.cookies.get(_cookie_name(request), "")


def keep(request: Request, response: Response, session: str) -> None:
    """Set the cookie with a session's id: scripts cannot read it, and requests from other sites do not carry it."""
    response.set_cookie(
        _cookie_name(request),
        session,
        path="/",
        httponly=True,
        samesite="strict",
        secure=came_by_tls(request),
    )


def forget(request: Request, response: Response) -> None:
    """Delete the cookie with the session's id."""
    response.delete_cookie(
        _cookie_name(request), path="/", httponly=True, samesite="strict", secure=came_by_tls(request)
    )


def _cookie_name(request: Request) -> str:
    """The cookie's name. It contains the port, because browsers share cookies between ports.

    Under TLS, other hosts cannot set it.
    """
    prefix = "__Host-" if came_by_tls(request) else ""
    return f"{prefix}{_COOKIE}-{request.url.port or 0}"
