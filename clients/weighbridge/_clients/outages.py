"""Outage of the service, told to whoever waits for its news: since when, and why; and that it is over."""

from __future__ import annotations

import logging
import time

from weighbridge._core.text.waits import Reminder
from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)

_FIRST_SECONDS = 2.0
"""After which it is told first: a service that is started again is back by then, or nearly."""


class Outage:
    """What is told of one service, at level WARNING: after a while, and then every `REMIND_SECONDS` until it is back.

    Args:
        server: its address.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._since = 0.0
        self._reminder: Reminder | None = None
        self._told = False

    def failed(self, error: WeighbridgeError) -> None:
        """It could not be reached, or the connection broke."""
        if self._reminder is None:
            self._since, self._reminder = time.time(), Reminder(first=_FIRST_SECONDS)
        elif self._reminder.due() is not None:
            log.warning(
                "the service at %s has been away since %s: %s", self._server, self._clock(), error.message
            )
            self._told = True

    def over(self) -> None:
        """There was news."""
        if self._told:
            log.warning("the service at %s is back; it was away since %s", self._server, self._clock())
        self._reminder, self._told = None, False

    def _clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._since))
