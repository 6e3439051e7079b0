"""Health of a service: named checks that run in the background, for probes that are answered at once.

May import: `service`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `checks`: what must be well for new work.
- `monitor`: runs checks, and tells what it found last.
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
"""How long a service that starts waits for its first findings, so that its first probe need not say that there are none."""


class Health:
    """Whether new work should be sent to a service. Answers at once, whatever the store does. Thread-safe.

    Args:
        checks: what is looked at in the background.
        draining: whether the service is shutting down.
    """

    def __init__(self, checks: Iterable[NamedCheck], draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._monitor = Monitor(checks)

    @staticmethod
    def of(service: Weighbridge) -> Health:
        """The health of a service."""
        return Health(checks_of(service), lambda: service.draining)

    def start(self) -> None:
        """Begin to look."""
        self._monitor.start(_FIRST_SECONDS)

    def findings(self) -> list[Check]:
        """All checks, by what they found last."""
        return [self._accepting(), *self._monitor.findings()]

    def check_ready(self, findings: list[Check]) -> None:
        """Raise Unavailable, with a line for each, if checks among these have failed."""
        failed = [check for check in findings if check.status is CheckStatus.FAIL]
        if failed:
            raise Unavailable(
                f"the service is not ready: {', '.join(check.name for check in failed)}",
                fix=failed[0].fix,
                details=[str(check) for check in failed],
            )

    def close(self) -> None:
        """End."""
        self._monitor.close()

    def _accepting(self) -> Check:
        if self._draining():
            return Check.fail("accepting", "the service is shutting down", "send new work to another one")
        return Check.ok("accepting", "new work is taken")
