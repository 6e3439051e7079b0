"""Engines beside the refs that they follow: reports as they come in, lists as they are asked for, and what collections must keep."""

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
from weighbridge_service.engines.entries import Entry, Owner, RefView, VersionTimes, served, shown
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
"""Age of a head that is not read again for a report: those who watch a model's refs read it more often."""


class KnownEngines:
    """Engines, and how they stand. Thread-safe.

    Args:
        catalog: which models and refs there are.
        registry: the engines.

    Attributes:
        registry: as given.
        changes: tells of models of whose engines something has changed; not that one has been heard again.
        steps: durations of parts of steps, of each update that an agent reports to this process.
        proofs: counts of proofs that agents report to this process.
    """

    def __init__(self, catalog: Catalog, registry: EngineRegistry) -> None:
        self._catalog = catalog
        self.registry = registry
        self.changes = Changes()
        self.steps = declared.ENGINE_STEP.histogram()
        self.proofs = declared.ENGINE_PROOFS.counter()

    @property
    def report_seconds(self) -> float:
        """After which an agent is to report again."""
        return self.registry.leases.report_s

    @property
    def figures(self) -> tuple[Collector, ...]:
        """Instruments of what agents report to this process."""
        return self.steps, self.proofs

    def report(
        self, owner: Owner, said: EngineReport, pulls: Callable[[str], bool] = lambda _model: True
    ) -> Engine:
        """Take note of what an agent says of its engine; the engine as all see it now.

        Args:
            owner: whose agent it is.
            said: by the agent.
            pulls: whether the agent may pull a model: the drafter's version is left out if it may not, as collections keep what engines draft by.

        Raises:
            InvalidArgument: a field of it cannot be.
            NotFound: there is no such model.
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
        if entry.report is report:  # else it is that of a later one
            self._count(entry, engine)
        return engine

    def _count(self, entry: Entry, engine: Engine) -> None:
        """Count what a report was the first to tell of."""
        if entry.updated:
            for part, seconds in engine.update_parts.items():
                self.steps.labels(part).observe(max(seconds, 0.0))
        made, failed = entry.proofs
        self.proofs.labels(FAILED).inc(failed)
        self.proofs.labels(PROVED).inc(max(made - failed, 0))

    def heard(self, told: Iterable[pb.ReportedEngine]) -> None:
        """Take note of what another replica has heard. What cannot be kept is passed over: that one has said so to the agent, or will list it."""
        for each in told:
            if not 0.0 <= each.age_seconds < self.registry.leases.forgotten_s:
                continue
            try:
                report = checked_report(wire.read(EngineReport, each.report))
                owner = Owner(each.identity, each.host)
                _, news = self.registry.take(owner, report, age_s=each.age_seconds, here=False)
            except WeighbridgeError as error:
                log.info("an engine that another replica tells of is passed over: %s", error.message)
                continue
            if news:
                self.changes.notify(ModelName.parse(report.model))

    def listed(self, model: str = "", sees: Callable[[str], bool] = lambda _model: True) -> list[Engine]:
        """The engines of a model, or of all models that are seen, by model, address and id.

        Raises:
            NotFound: there is no such model.
        """
        return self._standing(model, self._entries(model, sees))

    def page(
        self, model: str, sees: Callable[[str], bool], after: str, limit: int
    ) -> tuple[list[Engine], str]:
        """As `listed`, a page; and the token of the next one, which is empty if that was the last.

        Raises:
            InvalidArgument: ``after`` is no token.
            NotFound: there is no such model.
        """
        entries, more = page_of(self._entries(model, sees), after, limit)
        return self._standing(model, entries), more

    def _entries(self, model: str, sees: Callable[[str], bool]) -> list[Entry]:
        if model:
            return self.registry.of_model(model)
        return [entry for entry in self.registry.all() if sees(entry.report.model)]

    def _standing(self, model: str, entries: Iterable[Entry]) -> list[Engine]:
        """Entries, which are in the order of lists, beside the refs of their models; of a model that was asked for, raises NotFound."""
        if model:
            return self._shown(entries, self._refs(ModelName.parse(model)))
        found: list[Engine] = []
        for each, of_model in groupby(entries, key=lambda entry: entry.report.model):
            try:
                refs = self._refs(ModelName.parse(each))
            except WeighbridgeError:  # deleted since, or it cannot be read: its engines serve all the same
                refs = _Refs(None, {})
            found += self._shown(of_model, refs)
        return found

    def served(self, name: ModelName) -> dict[int, tuple[str, ...]]:
        """The versions of a model that live engines serve, are being taken to or draft by, and which engines these are."""
        registry = self.registry
        return served(registry.all(), str(name), registry.clock(), registry.leases)

    def fleets(self) -> list[Fleet]:
        """The engines of each model that report to this process, in a few figures. Heads are not read for it: reports have
        read them, every few seconds."""
        registry, seen = self.registry, dict[str, _Refs]()

        def view(entry: Entry) -> RefView:
            report = entry.report
            if report.model not in seen:
                seen[report.model] = self._refs_read_last(ModelName.parse(report.model))
            return seen[report.model].view(report.ref, report.version)

        here = [entry for entry in registry.all() if entry.here]
        return fleets(here, view, registry.clock(), unix_ms(), registry.leases)

    def _refs_read_last(self, name: ModelName) -> _Refs:
        """What the refs of a model named when its head was read last. Of older versions those nodes are asked that reports have asked before."""
        heads = self._catalog.heads
        head = heads.last_read(name)
        history = None if head is None else heads.history_of(name, head)
        return _Refs(history, self._catalog.snapshots.of_model(name))

    def _refs(self, name: ModelName) -> _Refs:
        """What the refs of a model name. Raises NotFound; of a store that is away, what was read last."""
        heads = self._catalog.heads
        head = heads.read_lately(name, _FRESH_SECONDS)
        if head is None or head.deleted or name.part:
            try:
                head = self._catalog.head(name)
            except AWAY:
                head = heads.last_read(name)
        snapshots = self._catalog.snapshots.of_model(name)
        return _Refs(None if head is None else heads.history_of(name, head), snapshots)

    def _shown(self, entries: Iterable[Entry], refs: _Refs) -> list[Engine]:
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
    """The refs of a model at one moment, beside its versions.

    Args:
        history: the model's; None if nothing is known of it.
        snapshots: what this process knows of its versions beyond that.
    """

    def __init__(self, history: History | None, snapshots: Mapping[int, VersionSnapshot]) -> None:
        self._history = history
        self._snapshots = snapshots
        self._times: dict[int, VersionTimes] = {}
        self._named = {} if history is None else refs_of(history.head, snapshots)
        self._behind: dict[tuple[int, int], int] = {}

    def view(self, ref: str, served: int) -> RefView:
        """What a ref names, and how far behind that an engine is which serves a version."""
        named = self._named.get(ref, 0)
        if not 0 < served < named:
            return RefView(named)
        span = served, named
        if span not in self._behind:
            self._behind[span] = self._between(served, named)
        return RefView(named, self._behind[span])

    def times(self, number: int) -> VersionTimes:
        """When a version was opened and ready, of those that this process or the head knows; nothing is read for it."""
        if number not in self._times:
            self._times[number] = self._known_times(number)
        return self._times[number]

    def _known_times(self, number: int) -> VersionTimes:
        known = self._snapshots.get(number)
        if known is not None and known.version.ready_time_ms:
            began, version = known.beginning or Beginning(), known.version
            return VersionTimes(
                version.create_time_ms, version.ready_time_ms, True, began.first_byte_ms, began.offer_s
            )
        entry = None if self._history is None else self._history.head.recent.get(number)
        return VersionTimes() if entry is None else VersionTimes(entry.created_ms, entry.ready_ms)

    def _between(self, served: int, named: int) -> int:
        """How many visible versions there are above one, up to another; `MOST_BEHIND` for as many or more."""
        most = min(MOST_BEHIND, named - served)
        states = {number: known.version.state for number, known in self._snapshots.items()}
        # of those that are stored the history has the ones that were not deleted since
        numbers = {number for number, state in states.items() if state.visible and not state.stored}
        if self._history is not None:
            try:
                numbers |= {entry.number for entry in self._history.newest(most, named + 1)}
            except WeighbridgeError:  # the store is away: those that the head itself has
                numbers |= self._history.head.recent.keys()
        return min(sum(served < number <= named for number in numbers), most)
