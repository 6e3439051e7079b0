"""Making ready versions durable, behind the back of those who pull them."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from weighbridge.errors import Unavailable, WeighbridgeError

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class Publisher:
    """Runs publications, one at a time, each in a thread of its own; one that waits to try again holds up no other.

    Args:
        attempts: how often a publication is tried before it is given up.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._running = 0
        self._closing = threading.Event()

    @property
    def running(self) -> int:
        """Publications that are not done."""
        with self._changed:
            return self._running

    def submit(
        self,
        what: str,
        publish: Callable[[str], None],
        *,
        on_failure: Callable[[WeighbridgeError, bool], None],
        on_success: Callable[[], None],
    ) -> None:
        """Publish in the background.

        Args:
            what: for the log.
            publish: does it; is given an id that is the same for all attempts.
            on_failure: is called after each failed attempt, with the error and whether it was the last.
            on_success: is called when it is done.
        """
        with self._changed:
            self._running += 1

        def run() -> None:
            try:
                self._run(what, publish, on_failure, on_success)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        threading.Thread(target=run, name=f"publish-{what}", daemon=True).start()

    def _run(
        self,
        what: str,
        publish: Callable[[str], None],
        on_failure: Callable[[WeighbridgeError, bool], None],
        on_success: Callable[[], None],
    ) -> None:
        write_id = uuid.uuid4().hex
        for attempt in range(1, self._attempts + 1):
            try:
                with self._turn:
                    publish(write_id)
            except Exception as error:  # a thread's last chance to say what happened
                known = (
                    error
                    if isinstance(error, WeighbridgeError)
                    else Unavailable(f"publishing failed: {error!r}")
                )
                last = attempt == self._attempts or self._closing.is_set()
                log.warning(
                    "publishing %s failed (attempt %d of %d): %s",
                    what,
                    attempt,
                    self._attempts,
                    known.message,
                )
                on_failure(known, last)
                if last:
                    return
                self._closing.wait(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE))
            else:
                on_success()
                return

    def hurry(self) -> None:
        """Wait no more between attempts, and give up what fails from now on."""
        self._closing.set()
