"""Is a version still being received, is it ready, or what has it failed of?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.resources import VersionState
from weighbridge_service.clock import unix_ms


class Lifecycle:
    """One version from its opening to its being ready or failed. Safe to use from many threads.

    Args:
        name: what the version is called in messages.

    Attributes:
        name: as given.
        changed: guards all that a process knows of the version; is notified of whatever somebody may wait for.
        state: receiving, ready or failed; the last two are final.
        error: what it failed of.
        ready_time_ms: when it became ready, in milliseconds since 1970 UTC; 0 if it did not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.state = VersionState.RECEIVING
        self.error: WeighbridgeError | None = None
        self.ready_time_ms = 0
        self._last_activity = time.monotonic()

    @property
    def is_receiving(self) -> bool:
        """Whether it is neither ready nor failed yet."""
        return self.state is VersionState.RECEIVING

    @property
    def idle_seconds(self) -> float:
        """How long nothing was heard of its ranks."""
        return time.monotonic() - self._last_activity

    def touch(self) -> None:
        """A rank has been heard of."""
        self._last_activity = time.monotonic()

    def become_ready(self) -> None:
        """Everything is here."""
        with self.changed:
            self.state = VersionState.READY
            self.ready_time_ms = unix_ms()
            self.changed.notify_all()

    def fail(self, error: WeighbridgeError) -> None:
        """It cannot be completed."""
        with self.changed:
            self.state = VersionState.FAILED
            self.error = error
            self.changed.notify_all()

    def check_not_failed(self) -> None:
        """Raise what the version has failed of, if it has."""
        if self.error is not None:
            error = self.error
            raise type(error)(error.message, fix=error.fix, details=error.details)

    def check_receiving(self) -> None:
        """Raise if nothing more can be received: what the version has failed of, or FailedPrecondition."""
        self.check_not_failed()
        if not self.is_receiving:
            raise FailedPrecondition(
                f"{self.name} is sealed",
                fix="push a new version: another step or run",
            )

    def wait_for(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, at most for so long.

        Args:
            reached: whether it is so; is asked with the condition held.
            seconds: how long.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or reached(), seconds)
            self.check_not_failed()
