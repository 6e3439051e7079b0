"""Sessions of browsers: what somebody has shown in a form, by an id that a cookie keeps.

A cookie counts on pages alone, which other sites cannot make anybody's browser post to; the API knows no cookies. A session holds what was
shown and not whose it is: the policy is asked at each request, so it ends with the token.
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
    """The sessions of one process. Thread-safe, and so many at most: of all, and of each identity.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, authorization: str, name: str) -> str:
        """A new session; its id. The oldest of the identity goes if it has too many, or the oldest of all.

        Args:
            authorization: what was shown, as in the header of that name.
            name: of the identity.
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
        """What was shown in a session; empty if there is none, or not any more."""
        with self._lock:
            found = self._sessions.get(session)
        return found.authorization if found is not None and found.until > self._clock() else ""

    def end(self, session: str) -> None:
        """End a session, if there is one."""
        with self._lock:
            self._sessions.pop(session, None)


def session_in(request: Request) -> str:
    """The id that a request's cookie keeps; empty if it has none."""
    return request.cookies.get(_cookie_name(request), "")


def keep(request: Request, response: Response, session: str) -> None:
    """Let the browser keep a session's id: no script sees it, and no other site's page sends it."""
    response.set_cookie(
        _cookie_name(request),
        session,
        path="/",
        httponly=True,
        samesite="strict",
        secure=came_by_tls(request),
    )


def forget(request: Request, response: Response) -> None:
    """Let the browser forget it."""
    response.delete_cookie(
        _cookie_name(request), path="/", httponly=True, samesite="strict", secure=came_by_tls(request)
    )


def _cookie_name(request: Request) -> str:
    """A name for each port, which browsers do not tell apart; under TLS one that no other host can set."""
    prefix = "__Host-" if came_by_tls(request) else ""
    return f"{prefix}{_COOKIE}-{request.url.port or 0}"
