"""Watch over whether an engine can be reached, beside the agent: its updates may be hours apart."""

from __future__ import annotations

import socket
import threading
import urllib.parse

from weighbridge._transport.outages import Outage
from weighbridge._transport.proxies import passes_proxy
from weighbridge.errors import Unavailable

LOOK_SECONDS = 5.0
"""Between two looks."""
_CONNECT_SECONDS = 2.0


class ReachWatch:
    """Looks every few seconds whether an engine's port takes connections. It logs at level WARNING when it has not for a while, since when, again
    every ten seconds, and that it does again. An engine that is busy or paused takes connections: it is not asked for anything.

    Args:
        url: the engine's address.
        every: seconds between two looks.
    """

    def __init__(self, url: str, every: float = LOOK_SECONDS) -> None:
        self._url = url
        self._every = every
        self._outage = Outage(url, "engine")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(_CONNECT_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            problem = unreachable(self._url)
            if problem:
                self._outage.failed(Unavailable(problem))
            else:
                self._outage.over()


def unreachable(url: str) -> str:
    """Reason why nothing takes connections at the host and port of an address; empty if something does, or if only a proxy reaches it."""
    try:
        if passes_proxy(url):
            return ""
        found = urllib.parse.urlsplit(url)
        port = found.port or (443 if found.scheme == "https" else 80)
        with socket.create_connection((found.hostname or "", port), _CONNECT_SECONDS):
            return ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return (reason or str(error) or type(error).__name__).lower()
