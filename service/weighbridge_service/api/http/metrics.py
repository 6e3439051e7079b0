"""Metrics in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weighbridge._core.resources import VersionState
from weighbridge_service.admission.byte_budget import Direction
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_service.service import Weighbridge
from weighbridge_storage.memory.memory_limits import read_memory


class Metrics(Collector):
    """The figures of one service, read when they are asked for; nothing is counted twice.

    Args:
        service: whose figures.
        lane: its local lane.
        calls: of its gRPC face.
    """

    def __init__(self, service: Weighbridge, lane: LaneServer, calls: Counter) -> None:
        self._service = service
        self._lane = lane
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(calls)

    def collect(self) -> Iterator[Metric]:
        """The figures as they stand."""
        service = self._service
        intake, serving = service.intake, service.serving
        yield _by_lane(
            "weighbridge_received_bytes",
            "Bytes pushed by trainers.",
            intake.bytes_in,
            intake.bytes_in_locally,
        )
        yield _by_lane(
            "weighbridge_sent_bytes",
            "Bytes sent to engines and trainers, or lent to them.",
            serving.bytes_out,
            serving.bytes_out_locally,
        )
        yield GaugeMetricFamily(
            "weighbridge_local_clients", "Processes connected to the local socket.", value=self._lane.clients
        )
        yield from self._in_flight()
        yield from self._quotas()
        versions = GaugeMetricFamily(
            "weighbridge_versions", "Versions this process knows of.", labels=["state"]
        )
        for state in VersionState:
            versions.add_metric([state.value], service.catalog.snapshots.count(state))
        yield versions
        yield GaugeMetricFamily(
            "weighbridge_versions_held",
            "Versions this process has received that live and latest pass by until they are approved.",
            value=service.gates.held,
        )
        yield GaugeMetricFamily(
            "weighbridge_publications_running",
            "Versions being made durable.",
            value=service.catalog.snapshots.unfinished,
        )
        collecting = service.collecting
        yield CounterMetricFamily(
            "weighbridge_deleted_versions",
            "Versions whose objects were deleted.",
            value=collecting.versions_deleted,
        )
        yield CounterMetricFamily(
            "weighbridge_deleted_bytes",
            "Bytes of the weights of deleted versions.",
            value=collecting.bytes_deleted,
        )
        yield CounterMetricFamily(
            "weighbridge_collection_failures",
            "Collections and deletions that failed.",
            value=collecting.failures,
        )
        usage = service.images.usage()
        images = GaugeMetricFamily(
            "weighbridge_image_bytes", "Bytes of image regions.", labels=["place", "use"]
        )
        images.add_metric(["memory", "held"], usage.memory_in_use)
        images.add_metric(["memory", "free"], usage.memory_free)
        images.add_metric(["disk", "held"], usage.disk_in_use)
        images.add_metric(["disk", "free"], usage.disk_free)
        yield images
        yield CounterMetricFamily("weighbridge_image_regions_made", "Image regions made.", value=usage.made)
        yield CounterMetricFamily(
            "weighbridge_image_regions_reused", "Images in a region used before.", value=usage.reused
        )

        yield GaugeMetricFamily(
            "weighbridge_memory_budget_bytes",
            "Most bytes of images in memory.",
            value=service.memory_budget.nbytes,
        )
        limits = GaugeMetricFamily(
            "weighbridge_memory_available_bytes", "Bytes that each limit on memory leaves.", labels=["limit"]
        )
        for limit in read_memory().limits:
            limits.add_metric([limit.name], limit.available)
        yield limits
        yield GaugeMetricFamily(
            "weighbridge_images_waiting",
            "Versions that wait for an image.",
            value=len(service.images.waiting()),
        )

        cache = service.read_cache.usage()
        yield CounterMetricFamily(
            "weighbridge_store_fetched_bytes",
            "Bytes of weights brought from a remote store into the read cache.",
            value=max(cache.fetched - service.peer_files.bytes_read, 0),
        )
        yield CounterMetricFamily(
            "weighbridge_replica_read_bytes",
            "Bytes of weights brought from other replicas into the read cache, of versions that were not durable yet.",
            value=service.peer_files.bytes_read,
        )
        yield GaugeMetricFamily(
            "weighbridge_read_cache_bytes", "Bytes of blocks in the read cache.", value=cache.nbytes
        )
        blocks = CounterMetricFamily(
            "weighbridge_read_cache_blocks", "Blocks that readers have wanted.", labels=["result"]
        )
        blocks.add_metric(["hit"], cache.hits)
        blocks.add_metric(["miss"], cache.misses)
        yield blocks
        yield GaugeMetricFamily(
            "weighbridge_store_readers",
            "Pulls, restores, exports and downloads that read from the store.",
            value=service.store_readers.count,
        )

    def _in_flight(self) -> Iterator[Metric]:
        found = self._service.byte_budget.in_flight
        nbytes = GaugeMetricFamily(
            "weighbridge_bytes_in_flight",
            "Bytes of the byte budget that streams over gRPC hold.",
            labels=["direction"],
        )
        waiting = GaugeMetricFamily(
            "weighbridge_streams_waiting",
            "Streams over gRPC that wait for room in the byte budget.",
            labels=["direction"],
        )
        for direction in Direction:
            nbytes.add_metric([direction.value], found.nbytes[direction])
            waiting.add_metric([direction.value], found.waiting[direction])
        yield nbytes
        yield waiting

    def _quotas(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "weighbridge_quota_used",
            "What identities and namespaces use of the limits that the policy gives them; stored bytes as this process saw them last.",
            labels=["kind", "of"],
        )
        limit = GaugeMetricFamily("weighbridge_quota_limit", "These limits.", labels=["kind", "of"])
        for quota in self._service.quotas.all():
            used.add_metric([quota.kind, quota.of], quota.used)
            limit.add_metric([quota.kind, quota.of], quota.limit)
        yield used
        yield limit

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)


def _by_lane(name: str, text: str, total: int, local: int) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["lane"])
    family.add_metric(["grpc"], total - local)
    family.add_metric(["local"], local)
    return family
