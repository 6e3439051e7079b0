"""Monitors whether an engine is reachable, independently of updates, which may be hours apart."""

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
"""Seconds between two checks."""
_CONNECT_SECONDS = 2.0
_GONE_SECONDS = 15.0
"""Seconds of refused connections after which pending calls are ended."""


class ReachWatch:
    """Checks every few seconds whether an engine's port accepts connections. If it has not for a while, logs this at
    level WARNING with the start time, repeats it every ten seconds, and logs the recovery. A busy or paused engine
    still accepts connections; no request is sent to it.

    If an engine refuses connections, pending calls to it are ended after a while, because a server that shuts down
    waits for them. Calls continue if connections time out instead, as with an overloaded server, or if a name cannot be
    resolved.

    Args:
        url: the engine's address.
        every: seconds between two checks.
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
        """Stop checking."""
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
    """Reason why nothing accepts connections at the host and port of an address; empty if something does, or if the
    address is reachable only through a proxy.
    """
    return _reason(_problems(url))


def _problems(url: str) -> list[Exception]:
    """Reasons why nothing accepts connections, one for each address of the host's name."""
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
    """Whether the host refuses connections because nothing listens there.

    Other addresses of its name may not be in use, as ``::1`` in containers.
    """
    return any(isinstance(each, ConnectionRefusedError) for each in problems) and not any(
        isinstance(each, TimeoutError) for each in problems
    )


def _reason(problems: list[Exception]) -> str:
    if not problems:
        return ""
    last = problems[-1]
    reason = last.strerror if isinstance(last, OSError) else None
    return (reason or str(last) or type(last).__name__).lower()
