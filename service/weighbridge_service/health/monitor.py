"""Monitor of named checks. Each check runs in the background, and probes return its last finding.

An orchestrator kills a process that does not respond to its probes in time, so probes never wait for a check. A run
that exceeds its timeout counts as a failure; the failure's message contains the time that it has taken so far. Each
check has its own thread, so a hanging store delays only its own checks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weighbridge._core.checks import Check, CheckStatus
from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)

_FAILED_EVERY = 1.0
"""Maximum seconds after which a failed check runs again."""


@dataclass(frozen=True, slots=True)
class NamedCheck:
    """A check that runs periodically.

    Attributes:
        name: name of the check, lower-case words joined by hyphens.
        run: runs the check; may block. A WeighbridgeError that it raises is a failure.
        every: seconds from the end of one run to the next.
        patience: seconds after which a run that has not ended counts as failed.
    """

    name: str
    run: Callable[[], Check]
    every: float
    patience: float


@dataclass(frozen=True, slots=True)
class Observation:
    """State of a check at one moment.

    Attributes:
        found: finding of its last run; None before the first has ended.
        running_since: beginning of the current run, in seconds of the monotonic clock; None if the check is not
            running.
    """

    found: Check | None = None
    running_since: float | None = None


def finding(check: NamedCheck, observed: Observation, now: float) -> Check:
    """The finding of a check at one moment.

    Args:
        check: the check.
        observed: its state.
        now: the moment, in seconds of the monotonic clock.
    """
    if observed.running_since is not None:
        waited = now - observed.running_since
        if waited > check.patience:
            return Check.fail(
                check.name,
                f"no answer for {readable_duration(waited, rough=True)}",
                "check that what it examines exists, and can be reached from this machine",
            )
    if observed.found is None:
        return Check.fail(check.name, "it has not been checked yet", "ask again in a second")
    return observed.found


class Monitor:
    """Runs checks until it is closed. Thread-safe.

    Args:
        checks: the checks, with distinct names.
    """

    def __init__(self, checks: Iterable[NamedCheck]) -> None:
        self._checks = {check.name: check for check in checks}
        self._observed = {name: Observation() for name in self._checks}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, seconds: float = 0.0) -> None:
        """Start the checks.

        Args:
            seconds: timeout for waiting for the first runs of all checks.
        """
        first = [threading.Event() for _ in self._checks]
        for check, ended in zip(self._checks.values(), first, strict=True):
            thread = threading.Thread(target=self._watch, args=(check, ended), name=f"check-{check.name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        deadline = time.monotonic() + seconds
        for ended in first:
            ended.wait(max(deadline - time.monotonic(), 0.0))

    def findings(self) -> list[Check]:
        """Current findings of all checks, in the order in which they were given. Does not block."""
        with self._lock:
            observed = dict(self._observed)
        now = time.monotonic()
        return [finding(check, observed[name], now) for name, check in self._checks.items()]

    def close(self) -> None:
        """Stop the checks. A run that does not end within 0.1 s continues in its daemon thread."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(0.1)

    def _watch(self, check: NamedCheck, ended: threading.Event) -> None:
        while not self._stopping.is_set():
            self._note(check.name, replace(self._observed[check.name], running_since=time.monotonic()))
            found = _run(check)
            self._log(self._observed[check.name].found, found)
            self._note(check.name, Observation(found))
            ended.set()
            failed = found.status is CheckStatus.FAIL
            self._stopping.wait(min(check.every, _FAILED_EVERY) if failed else check.every)

    def _note(self, name: str, observed: Observation) -> None:
        with self._lock:
            self._observed[name] = observed

    def _log(self, before: Check | None, after: Check) -> None:
        """Log when a check begins to fail, and when it recovers."""
        failed = before is not None and before.status is CheckStatus.FAIL
        if after.status is CheckStatus.FAIL and not failed:
            log.error("%s", after)
        elif failed and after.status is not CheckStatus.FAIL:
            log.info("%s", after)


def _run(check: NamedCheck) -> Check:
    try:
        found = check.run()
    except WeighbridgeError as error:
        return Check.fail(check.name, error.message, error.fix)
    except Exception as error:
        log.exception("the check %s broke", check.name)
        return Check.fail(check.name, f"the check itself failed: {error!r}", "see the service's log")
    return replace(found, name=check.name)
