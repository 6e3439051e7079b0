"""Log messages about an outage of the service: its start, its cause, the time left for retries, and its end."""

from __future__ import annotations

import logging
import threading
import time

from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.waits import Reminder
from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)

_FIRST_SECONDS = 2.0
"""Seconds until the first message: a service that is restarted is back by then, or nearly."""


class Outage:
    """Outage of one service, logged at level WARNING: after a while, and then every `REMIND_SECONDS` until it is back.

    Thread-safe.

    Args:
        server: its address.
        kind: kind of the server, if it is another than the service.
    """

    def __init__(self, server: str, kind: str = "service") -> None:
        self._server = server
        self._kind = kind
        self._lock = threading.Lock()
        self._since = 0.0
        self._reminder: Reminder | None = None
        self._told = False

    def failed(self, error: WeighbridgeError, left: float | None = None) -> None:
        """Note that the service could not be reached or had no room, or that the connection broke.

        Args:
            error: the error.
            left: seconds for which retries go on; None if without limit.
        """
        with self._lock:
            if self._reminder is None:
                self._since, self._reminder = time.time(), Reminder(first=_FIRST_SECONDS)
                return
            if self._reminder.due() is None:
                return
            first, self._told = not self._told, True
        if left is None:
            log.warning(
                "the %s at %s has been away since %s, for %s: %s",
                self._kind,
                self._server,
                self._clock(),
                self._lasted(),
                error.message,
            )
        else:
            log.warning(
                "%s; since %s, retrying for another %s%s",
                error.message,
                self._clock(),
                readable_duration(left, rough=True),
                f"; {error.fix}" if first and error.fix else "",
            )

    def over(self) -> None:
        """Note progress or an answer, which ends the outage."""
        if self._reminder is None:  # the usual case, without taking the lock
            return
        with self._lock:
            told, self._reminder, self._told = self._told, None, False
        if told:
            log.warning(
                "the %s at %s is back; it was away since %s, for %s",
                self._kind,
                self._server,
                self._clock(),
                self._lasted(),
            )

    def _lasted(self) -> str:
        return readable_duration(time.time() - self._since, rough=True)

    def _clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._since))
