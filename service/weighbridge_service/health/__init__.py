"""Health of a service: named checks run in the background, so that probes get a response at once.

May import: `service`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `checks`: conditions for accepting new work.
- `monitor`: runs checks, and stores their last findings.
- `doctor`: checks of ``weighbridge doctor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weighbridge._core.checks import Check, CheckStatus
from weighbridge.errors import Unavailable
from weighbridge_service.health.checks import checks_of
from weighbridge_service.health.monitor import Monitor, NamedCheck
from weighbridge_service.service import Weighbridge

_FIRST_SECONDS = 2.0
"""Seconds that a starting service waits for its first findings. Without them its first probe would fail."""


class Health:
    """Whether new work should be sent to a service. Never waits for the store. Thread-safe.

    Args:
        checks: checks that run in the background.
        draining: returns whether the service is shutting down.
    """

    def __init__(self, checks: Iterable[NamedCheck], draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._monitor = Monitor(checks)

    @staticmethod
    def of(service: Weighbridge) -> Health:
        """The health of a service."""
        return Health(checks_of(service), lambda: service.draining)

    def start(self) -> None:
        """Start the checks."""
        self._monitor.start(_FIRST_SECONDS)

    def findings(self) -> list[Check]:
        """Last findings of all checks."""
        return [self._accepting(), *self._monitor.findings()]

    def check_ready(self, findings: list[Check]) -> None:
        """Raise Unavailable if any of these findings is a failure.

        The error's details contain a line for each failure.
        """
        failed = [check for check in findings if check.status is CheckStatus.FAIL]
        if failed:
            raise Unavailable(
                f"the service is not ready: {', '.join(check.name for check in failed)}",
                fix=failed[0].fix,
                details=[str(check) for check in failed],
            )

    def close(self) -> None:
        """Stop the checks."""
        self._monitor.close()

    def _accepting(self) -> Check:
        if self._draining():
            return Check.fail("accepting", "the service is shutting down", "send new work to another one")
        return Check.ok("accepting", "new work is taken")
