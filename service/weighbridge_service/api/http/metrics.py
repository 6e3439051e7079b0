"""Metrics in Prometheus' format."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from weighbridge._core.checks import CheckStatus
from weighbridge._core.resources import VersionState
from weighbridge._version import VERSION
from weighbridge_service.admission.byte_budget import Direction
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_service.health import Health
from weighbridge_service.metrics import declared
from weighbridge_service.metrics.instruments import CallInstruments, RequestInstruments
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE
from weighbridge_service.push.machine.shown import silent_ranks
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_service.service import Weighbridge
from weighbridge_storage.memory.memory_limits import read_memory

_STATUSES = {CheckStatus.OK: 0, CheckStatus.WARN: 1, CheckStatus.FAIL: 2}


class Metrics(Collector):
    """Metrics of a service: values that are read at each scrape, and the instruments of its components.

    Args:
        service: the service.
        lane: its local lane.
        calls: instruments of its gRPC server.
        health: its checks.

    Attributes:
        requests: instruments of its HTTP server.
    """

    def __init__(self, service: Weighbridge, lane: LaneServer, calls: CallInstruments, health: Health) -> None:
        self._service = service
        self._lane = lane
        self._health = health
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = RequestInstruments()
        observed = (*service.push_figures, *service.store_figures, *calls, *self.requests)
        for instrument in (*observed, *service.engines.figures):
            self.registry.register(instrument)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at each scrape."""
        yield from self._pushes()
        yield from self._streams()
        yield from self._engines()
        yield from self._store()
        yield from self._memory()
        yield from self._retention()
        yield declared.BUILD.family({VERSION: 1})
        yield declared.CHECK.family({check.name: _STATUSES[check.status] for check in self._health.findings()})

    def _pushes(self) -> Iterator[Metric]:
        service = self._service
        count = service.catalog.snapshots.count
        yield declared.VERSIONS.family({state.value: count(state) for state in VersionState})
        yield declared.HELD.family(service.gates.held)
        yield declared.PUBLICATIONS.family(service.catalog.snapshots.unfinished)
        states = [session.state for session in service.registry.all()]
        incomplete = [state for state in states if state.phase in INCOMPLETE]
        waited_for = [(len(ranks), each.heard_at) for each in incomplete if (ranks := silent_ranks(each))]
        now, now_ms = time.monotonic(), unix_ms()
        yield declared.WAITING_RANKS.family(sum(ranks for ranks, _ in waited_for))
        yield declared.SILENT.family(max((now - heard_at for _, heard_at in waited_for), default=0.0))
        undurable = [now_ms - state.ready_ms for state in states if state.phase in VISIBLE]
        yield declared.UNDURABLE.family(max(undurable, default=0) / 1000)

    def _streams(self) -> Iterator[Metric]:
        intake, serving = self._service.intake, self._service.serving
        yield declared.RECEIVED.family(_by_lane(intake.bytes_in, intake.bytes_in_locally))
        yield declared.SENT.family(_by_lane(serving.bytes_out, serving.bytes_out_locally))
        yield declared.LOCAL_CLIENTS.family(self._lane.clients)
        found = self._service.byte_budget.in_flight
        yield declared.IN_FLIGHT.family({each.value: found.nbytes[each] for each in Direction})
        yield declared.STREAMS_WAITING.family({each.value: found.waiting[each] for each in Direction})

    def _engines(self) -> Iterator[Metric]:
        fleets = self._service.engines.fleets()
        yield declared.ENGINES.families(
            [
                ((each.model, standing, state), count)
                for each in fleets
                for (standing, state), count in each.engines.items()
            ]
        )
        yield declared.ENGINES_BEHIND.family({each.model: each.behind for each in fleets})
        yield declared.ENGINES_BEHIND_FOR.family({each.model: each.behind_s for each in fleets})
        yield declared.ENGINES_SILENT.family({each.model: each.silent_s for each in fleets})
        yield declared.ENGINES_UPDATE.families(
            [
                ((each.model, part), seconds)
                for each in fleets
                for part, seconds in (("prepare", each.prepare_s), ("pause", each.pause_s))
            ]
        )
        yield declared.ENGINES_PROVED.families(
            [((each.model, verdict), count) for each in fleets for verdict, count in sorted(each.proofs.items())]
        )
        yield declared.ENGINES_PROOF_AGE.family({each.model: each.proof_age_s for each in fleets})
        yield declared.ENGINES_PROOF.family({each.model: each.proof_s for each in fleets})
        yield declared.ENGINES_DRIFT.family({each.model: each.drift for each in fleets if each.drift is not None})

    def _store(self) -> Iterator[Metric]:
        service = self._service
        cache, from_replicas = service.read_cache.usage(), service.peer_files.bytes_read
        yield declared.STORE_SILENT.family(service.store_silent_seconds)
        yield declared.STORE_FETCHED.family(max(cache.fetched - from_replicas, 0))
        yield declared.REPLICA_READ.family(from_replicas)
        yield declared.CACHE.family(cache.nbytes)
        yield declared.CACHE_BLOCKS.family({"hit": cache.hits, "miss": cache.misses})
        yield declared.STORE_READERS.family(service.store_readers.count)

    def _memory(self) -> Iterator[Metric]:
        service = self._service
        usage = service.images.usage()
        yield declared.IMAGES.families(
            [
                (("memory", "held"), usage.memory_in_use),
                (("memory", "free"), usage.memory_free),
                (("disk", "held"), usage.disk_in_use),
                (("disk", "free"), usage.disk_free),
            ]
        )
        yield declared.IMAGES_WAITING.family(len(service.images.waiting()))
        yield declared.BUDGET.family(service.memory_budget.nbytes)
        yield declared.AVAILABLE.family({limit.name: limit.available for limit in read_memory().limits})
        yield declared.REGIONS_MADE.family(usage.made)
        yield declared.REGIONS_REUSED.family(usage.reused)

    def _retention(self) -> Iterator[Metric]:
        collecting = self._service.collecting
        yield declared.DELETED.family(collecting.versions_deleted)
        yield declared.DELETED_BYTES.family(collecting.bytes_deleted)
        yield declared.COLLECTION_FAILURES.family(collecting.failures)
        quotas = list(self._service.quotas.all())
        yield declared.QUOTA_USED.families([((each.kind, each.of), each.used) for each in quotas])
        yield declared.QUOTA_LIMIT.families([((each.kind, each.of), each.limit) for each in quotas])

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _by_lane(total: int, local: int) -> dict[str, float]:
    return {"grpc": total - local, "local": local}
