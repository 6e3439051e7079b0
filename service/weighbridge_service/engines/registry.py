"""Registry of engines: entries of engines that have reported recently, up to a maximum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weighbridge._core.engines.facts import EngineReport
from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.quotas import Shares
from weighbridge_service.engines.entries import EngineEntry, Leases, Owner, after_report
from weighbridge_service.runtime.clock import unix_ms

MOST_ENGINES = 8192
"""Maximum number of entries, of a few kilobytes each. One identity, or one host without a policy, may use at most three
fourths of them, and one fourth while others use many.
"""


class EngineRegistry:
    """The engines that this process knows. Thread-safe.

    Args:
        leases: durations for which reports are valid.
        most: maximum number of entries.
        clock: returns seconds of a monotonic clock.
        time_ms: returns milliseconds since 1970 UTC.

    Attributes:
        leases, clock: as given.
    """

    def __init__(
        self,
        leases: Leases,
        most: int = MOST_ENGINES,
        clock: Callable[[], float] = time.monotonic,
        time_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self.leases = leases
        self.clock = clock
        self._time_ms = time_ms
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], EngineEntry] = {}
        self._shares: Shares[str] = Shares(most)

    def take(
        self, owner: Owner, report: EngineReport, *, age_s: float = 0.0, here: bool = True
    ) -> tuple[EngineEntry, bool]:
        """Record a report. Returns the engine's entry, and whether its facts have changed.

        Args:
            owner: owner of the engine.
            report: the report, validated.
            age_s: age of the report in seconds, if another replica received it.
            here: whether this process received it from the agent.

        Raises:
            ResourceExhausted: the maximum number of engines is reached, in total or for this owner.
        """
        now_s = self.clock()
        with self._lock:
            before = self._entries.get((owner.identity, report.engine_id))
            # the agent of an engine that was gone may have restarted, and count its reports (`beat`) from the beginning
            lasting = before if before is not None and now_s - before.heard_s < self.leases.gone_s else None
            entry = after_report(lasting, owner, report, now_s, self._time_ms(), age_s=age_s, here=here)
            if before is None:
                self._make_room(entry, now_s)
            else:
                self._shares.add(before.owner.quota, -1)
            self._shares.add(entry.owner.quota)
            self._entries[entry.key] = entry
        return entry, before is None or before.facts != entry.facts

    def _forget(self, entry: EngineEntry) -> None:
        """Remove an entry. The caller holds the lock."""
        del self._entries[entry.key]
        self._shares.add(entry.owner.quota, -1)

    def _make_room(self, entry: EngineEntry, now_s: float) -> None:
        """Remove forgotten entries, and entries of gone engines that the new agent replaces. If the registry is still
        full, remove the entries of all gone engines. The caller holds the lock. Raises ResourceExhausted.
        """
        for there in list(self._entries.values()):
            replaced = bool(entry.report.address) and there.place == entry.place
            forgotten = now_s - there.heard_s >= self.leases.forgotten_s
            if forgotten or (replaced and there.is_gone(now_s, self.leases)):
                self._forget(there)
        quota, shares = entry.owner.quota, self._shares
        if not shares.has_room(quota):
            for there in list(self._entries.values()):
                if there.is_gone(now_s, self.leases):
                    self._forget(there)
        if not shares.has_room(quota):
            raise ResourceExhausted(
                (
                    f"{shares.held} engines of {shares.total} have reported, "
                    f"{shares.of.get(quota, 0)} of them by {quota or 'you'}"
                ),
                fix="let each engine have one agent; engines that stop reporting are forgotten",
                retry_after=self.leases.report_s,
            )

    def all(self) -> list[EngineEntry]:
        """Entries of all engines that are not forgotten, sorted by model, address and id."""
        now_s = self.clock()
        with self._lock:
            found = [e for e in self._entries.values() if now_s - e.heard_s < self.leases.forgotten_s]
        return sorted(found, key=lambda e: e.order)

    def of_model(self, model: str) -> list[EngineEntry]:
        """Entries of the engines of one model, sorted as in `all`."""
        return [entry for entry in self.all() if entry.report.model == model]
