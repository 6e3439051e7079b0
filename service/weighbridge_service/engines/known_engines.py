"""Engines joined with the refs that they follow: incoming reports, lists for clients, and the versions that collections
must keep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from prometheus_client.registry import Collector

from weighbridge._core.engines.facts import FAILED, MOST_BEHIND, PROVED, Engine, EngineReport
from weighbridge._transport import wire
from weighbridge.errors import WeighbridgeError
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.catalog.catalog import AWAY, Catalog
from weighbridge_service.catalog.changes import Changes
from weighbridge_service.catalog.head_versions import refs_of
from weighbridge_service.catalog.snapshots import Beginning, VersionSnapshot
from weighbridge_service.engines.entries import EngineEntry, Owner, RefView, VersionTimes, served, shown
from weighbridge_service.engines.fleets import Fleet, fleets
from weighbridge_service.engines.pages import page_of
from weighbridge_service.engines.registry import EngineRegistry
from weighbridge_service.engines.reports import checked_report
from weighbridge_service.metrics import declared
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.history import History

log = logging.getLogger(__name__)

_FRESH_SECONDS = 1.0
"""Maximum age in seconds of a head that is reused for a report. Watches of a model's refs read its head more often."""


class KnownEngines:
    """Engines and their standings. Thread-safe.

    Args:
        catalog: catalog of models and refs.
        registry: entries of the engines.

    Attributes:
        registry: as given.
        changes: notifies listeners of models whose engines have changed. A report without changes does not cause a
            notification.
        steps: durations of parts of steps, for each update that an agent reports to this process.
        proofs: number of proofs that agents report to this process.
    """

    def __init__(self, catalog: Catalog, registry: EngineRegistry) -> None:
        self._catalog = catalog
        self.registry = registry
        self.changes = Changes()
        self.steps = declared.ENGINE_STEP.histogram()
        self.proofs = declared.ENGINE_PROOFS.counter()

    @property
    def report_seconds(self) -> float:
        """Seconds after which an agent must report again."""
        return self.registry.leases.report_s

    @property
    def figures(self) -> tuple[Collector, ...]:
        """Metrics of the reports to this process."""
        return self.steps, self.proofs

    def report(self, owner: Owner, said: EngineReport, pulls: Callable[[str], bool] = lambda _model: True) -> Engine:
        """Record an agent's report, and return its engine in the public form.

        Args:
            owner: owner of the engine.
            said: the report.
            pulls: returns whether the agent may pull a model. If it may not pull the drafter, the drafter is dropped
                from the report, because collections keep the versions of drafters.

        Raises:
            InvalidArgument: a field of the report is invalid.
            NotFound: the model does not exist.
            ResourceExhausted: too many engines have reported.
        """
        report = checked_report(said)
        if report.drafter and not pulls(report.drafter.rpartition("@")[0]):
            report = replace(report, drafter="")
        name = ModelName.parse(report.model)
        refs = self._refs(name)
        entry, news = self.registry.take(owner, report)
        if news:
            self.changes.notify(name)
        (engine,) = self._shown([entry], refs)
        if entry.report is report:  # else the registry already had a newer report
            self._count(entry, engine)
        return engine

    def _count(self, entry: EngineEntry, engine: Engine) -> None:
        """Count the update and the proofs that are new in a report."""
        if entry.updated:
            for part, seconds in engine.update_parts.items():
                self.steps.labels(part).observe(max(seconds, 0.0))
        made, failed = entry.proofs
        self.proofs.labels(FAILED).inc(failed)
        self.proofs.labels(PROVED).inc(max(made - failed, 0))

    def heard(self, told: Iterable[pb.ReportedEngine]) -> None:
        """Record reports that another replica has received. Reports that cannot be recorded are skipped and logged: the
        other replica has refused them, or lists their engines itself.
        """
        for each in told:
            if not 0.0 <= each.age_seconds < self.registry.leases.forgotten_s:
                continue
            try:
                report = checked_report(wire.read(EngineReport, each.report))
                owner = Owner(each.identity, each.host)
                _, news = self.registry.take(owner, report, age_s=each.age_seconds, here=False)
            except WeighbridgeError as error:
                log.info("an engine that another replica reports is skipped: %s", error.message)
                continue
            if news:
                self.changes.notify(ModelName.parse(report.model))

    def listed(self, model: str = "", sees: Callable[[str], bool] = lambda _model: True) -> list[Engine]:
        """The engines of a model, or of all models that the caller may see, sorted by model, address and id.

        Raises:
            NotFound: the model does not exist.
        """
        return self._standing(model, self._entries(model, sees))

    def page(self, model: str, sees: Callable[[str], bool], after: str, limit: int) -> tuple[list[Engine], str]:
        """A page of `listed`, and the token of the next page, which is empty after the last one.

        Raises:
            InvalidArgument: ``after`` is not a page token.
            NotFound: the model does not exist.
        """
        entries, more = page_of(self._entries(model, sees), after, limit)
        return self._standing(model, entries), more

    def _entries(self, model: str, sees: Callable[[str], bool]) -> list[EngineEntry]:
        if model:
            return self.registry.of_model(model)
        return [entry for entry in self.registry.all() if sees(entry.report.model)]

    def _standing(self, model: str, entries: Iterable[EngineEntry]) -> list[Engine]:
        """Entries in their public form. They must be sorted.

        Raises NotFound if ``model`` names a model that does not exist.
        """
        if model:
            return self._shown(entries, self._refs(ModelName.parse(model)))
        found: list[Engine] = []
        for each, of_model in groupby(entries, key=lambda entry: entry.report.model):
            try:
                refs = self._refs(ModelName.parse(each))
            except WeighbridgeError:  # deleted or unreadable; its engines may still serve it
                refs = _Refs(None, {})
            found += self._shown(of_model, refs)
        return found

    def served(self, name: ModelName) -> dict[int, tuple[str, ...]]:
        """The versions of a model that live engines serve, update to or use as a drafter, with labels of these
        engines.
        """
        registry = self.registry
        return served(registry.all(), str(name), registry.clock(), registry.leases)

    def fleets(self) -> list[Fleet]:
        """Summary figures of the engines that report to this process, by model.

        Reads no heads: reports read them every few seconds.
        """
        registry, seen = self.registry, dict[str, _Refs]()

        def view(entry: EngineEntry) -> RefView:
            report = entry.report
            if report.model not in seen:
                seen[report.model] = self._refs_read_last(ModelName.parse(report.model))
            return seen[report.model].view(report.ref, report.version)

        here = [entry for entry in registry.all() if entry.here]
        return fleets(here, view, registry.clock(), unix_ms(), registry.leases)

    def _refs_read_last(self, name: ModelName) -> _Refs:
        """The refs of a model from its last read head.

        The history may read older nodes, but only those that reports have read before.
        """
        heads = self._catalog.heads
        head = heads.last_read(name)
        history = None if head is None else heads.history_of(name, head)
        return _Refs(history, self._catalog.snapshots.of_model(name))

    def _refs(self, name: ModelName) -> _Refs:
        """The refs of a model. If the store is unavailable, from its last read head. Raises NotFound."""
        heads = self._catalog.heads
        head = heads.read_lately(name, _FRESH_SECONDS)
        if head is None or head.deleted or name.part:
            try:
                head = self._catalog.head(name)
            except AWAY:
                head = heads.last_read(name)
        snapshots = self._catalog.snapshots.of_model(name)
        return _Refs(None if head is None else heads.history_of(name, head), snapshots)

    def _shown(self, entries: Iterable[EngineEntry], refs: _Refs) -> list[Engine]:
        now_s, leases = self.registry.clock(), self.registry.leases
        return [
            shown(
                each,
                refs.view(each.report.ref, each.report.version),
                now_s,
                leases,
                refs.times(each.report.update_version),
            )
            for each in entries
        ]


class _Refs:
    """The refs and versions of a model at one moment.

    Args:
        history: history of the model; None if unknown.
        snapshots: further versions of the model that this process knows.
    """

    def __init__(self, history: History | None, snapshots: Mapping[int, VersionSnapshot]) -> None:
        self._history = history
        self._snapshots = snapshots
        self._times: dict[int, VersionTimes] = {}
        self._named = {} if history is None else refs_of(history.head, snapshots)
        self._behind: dict[tuple[int, int], int] = {}

    def view(self, ref: str, served: int) -> RefView:
        """State of a ref for an engine that serves the version ``served``."""
        named = self._named.get(ref, 0)
        if not 0 < served < named:
            return RefView(named)
        span = served, named
        if span not in self._behind:
            self._behind[span] = self._between(served, named)
        return RefView(named, self._behind[span])

    def times(self, number: int) -> VersionTimes:
        """Times of a version, if this process or the head knows them. Reads nothing."""
        if number not in self._times:
            self._times[number] = self._known_times(number)
        return self._times[number]

    def _known_times(self, number: int) -> VersionTimes:
        known = self._snapshots.get(number)
        if known is not None and known.version.ready_time_ms:
            began, version = known.beginning or Beginning(), known.version
            return VersionTimes(version.create_time_ms, version.ready_time_ms, True, began.first_byte_ms, began.offer_s)
        entry = None if self._history is None else self._history.head.recent.get(number)
        return VersionTimes() if entry is None else VersionTimes(entry.created_ms, entry.ready_ms)

    def _between(self, served: int, named: int) -> int:
        """Number of visible versions after ``served`` up to ``named``, limited to `MOST_BEHIND`."""
        most = min(MOST_BEHIND, named - served)
        states = {number: known.version.state for number, known in self._snapshots.items()}
        # stored versions come from the history, because the snapshots may have versions that were deleted since
        numbers = {number for number, state in states.items() if state.visible and not state.stored}
        if self._history is not None:
            try:
                numbers |= {entry.number for entry in self._history.newest(most, named + 1)}
            except WeighbridgeError:  # the store is unavailable: use the versions in the head itself
                numbers |= self._history.head.recent.keys()
        return min(sum(served < number <= named for number in numbers), most)
