"""Reports of an engine by its first rank, where no agent reports: which version it serves, so that the service lists it and keeps that one."""

from __future__ import annotations

import weakref
from typing import Any

from weighbridge._clients.engine import EngineClient
from weighbridge._reporting.reporter import EngineReporter

_AGENT_SECONDS = 30.0
"""How long an agent is waited for, which reports itself, before the engine does."""


class RankReports:
    """Reports of one engine. Nothing of it delays or fails an update.

    Args:
        kind: what the engine is; empty if it is not to be reported.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._reporter: EngineReporter | None = None

    def say(self, client: EngineClient, model: str, **changes: Any) -> None:
        """Say what has changed.

        Args:
            client: of the service that versions come from.
            model: of which the engine serves versions.
            changes: as for `EngineReporter.say`.
        """
        if not self._kind:
            return
        if self._reporter is None:
            self._reporter = EngineReporter(client, model, kind=self._kind, delay=_AGENT_SECONDS)
            weakref.finalize(self, self._reporter.stop)
        self._reporter.say(model=model, **changes)

    def end(self) -> None:
        """Report no more: the engine ends, or an agent reports."""
        self._kind = ""
        if self._reporter is not None:
            self._reporter.stop()
