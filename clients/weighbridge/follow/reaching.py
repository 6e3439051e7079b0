"""Watch over whether an engine can be reached, beside the agent: its updates may be hours apart."""

from __future__ import annotations

import socket
import threading
import time
import urllib.parse

from weighbridge._transport.outages import Outage
from weighbridge._transport.proxies import passes_proxy
from weighbridge.errors import Unavailable
from weighbridge.follow.answers import abandon

LOOK_SECONDS = 5.0
"""Between two looks."""
_CONNECT_SECONDS = 2.0
_GONE_SECONDS = 15.0
"""For which connections are refused until calls that wait for an answer are ended."""


class ReachWatch:
    """Looks every few seconds whether an engine's port takes connections. It logs at level WARNING when it has not for a while, since when, again
    every ten seconds, and that it does again. An engine that is busy or paused takes connections: it is not asked for anything.

    Calls that wait for an answer of an engine that refuses connections are ended after a while: a server that shuts down waits for them. Where
    connections are not refused, but take too long, as at a server that has more to do than it can, or a name is not known, calls go on.

    Args:
        url: the engine's address.
        every: seconds between two looks.
        gone: seconds of refused connections after which calls are ended.
    """

    def __init__(self, url: str, every: float = LOOK_SECONDS, gone: float = _GONE_SECONDS) -> None:
        self._url = url
        self._every = every
        self._gone = gone
        self._outage = Outage(url, "engine")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(_CONNECT_SECONDS)

    def _run(self) -> None:
        since = time.monotonic()
        while not self._ended.wait(self._every):
            problems = _problems(self._url)
            if not _is_refused(problems):
                since = time.monotonic()
            if not problems:
                self._outage.over()
                continue
            self._outage.failed(Unavailable(_reason(problems)))
            if time.monotonic() - since >= self._gone:
                abandon(self._url)


def unreachable(url: str) -> str:
    """Reason why nothing takes connections at the host and port of an address; empty if something does, or if only a proxy reaches it."""
    return _reason(_problems(url))


def _problems(url: str) -> list[Exception]:
    """Reasons why nothing takes connections, one for each address that the host's name stands for."""
    try:
        if passes_proxy(url):
            return []
        found = urllib.parse.urlsplit(url)
        place = found.hostname or "", found.port or (443 if found.scheme == "https" else 80)
        with socket.create_connection(place, _CONNECT_SECONDS, all_errors=True):
            return []
    except ExceptionGroup as group:
        return list(group.exceptions)
    except (OSError, ValueError) as error:
        return [error]


def _is_refused(problems: list[Exception]) -> bool:
    """Whether the host says that nothing listens there. Other addresses of its name may not be in use, as ``::1`` in containers."""
    return any(isinstance(each, ConnectionRefusedError) for each in problems) and not any(
        isinstance(each, TimeoutError) for each in problems
    )


def _reason(problems: list[Exception]) -> str:
    if not problems:
        return ""
    last = problems[-1]
    reason = last.strerror if isinstance(last, OSError) else None
    return (reason or str(last) or type(last).__name__).lower()
