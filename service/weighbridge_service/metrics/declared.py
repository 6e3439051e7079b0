"""Declared metrics: name, kind, meaning, labels and unit of each, once.

What is counted, shown on dashboards and asked for by alerts is derived from these values. Names follow Prometheus' conventions: base units as
suffixes, ``_total`` for counters.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Kind(enum.StrEnum):
    """What a metric's value is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Row(enum.StrEnum):
    """What a metric is about: a row of the dashboard."""

    PUSHES = "Pushes"
    STREAMS = "Streams of weights"
    STORE = "Object store"
    MEMORY = "Memory"
    RETENTION = "Retention"
    SERVICE = "Service"


SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
"""Upper bounds of the buckets of durations: from a call that reads memory to a push that waits for its ranks."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric.

    Attributes:
        name: as it is exposed; of a histogram, without ``_bucket``, ``_sum`` and ``_count``.
        kind: what its value is.
        row: what it is about.
        text: what it says.
        labels: names of its labels.
        values: values of its only label, which are exposed from the start: a counter that appears with its first increment has not increased.
    """

    name: str
    kind: Kind
    row: Row
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """``bytes``, ``seconds``, or empty for plain numbers."""
        words = self.name.removesuffix("_total").split("_")
        return words[-1] if words[-1] in ("bytes", "seconds") else ""

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus keeps it."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)

    def family(self, samples: Mapping[str, float] | float) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric with values that were just read: one, or one for each value of its only label."""
        if isinstance(samples, Mapping):
            return self.families([((label,), value) for label, value in samples.items()])
        return self.families([((), samples)])

    def families(
        self, samples: Sequence[tuple[tuple[str, ...], float]]
    ) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric with values that were just read, each with the values of its labels."""
        of_kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        found = of_kind(self.name, self.text, labels=self.labels)
        for labels, value in samples:
            found.add_metric(labels, value)
        return found

    def counter(self) -> Counter:
        """An instrument that counts it."""
        found = Counter(self.name, self.text, self.labels, registry=None)
        for value in self.values:
            found.labels(value)
        return found

    def histogram(self) -> Histogram:
        """An instrument that observes it."""
        found = Histogram(self.name, self.text, self.labels, registry=None, buckets=SECONDS)
        for value in self.values:
            found.labels(value)
        return found


def _counter(name: str, row: Row, text: str, *labels: str, values: tuple[str, ...] = ()) -> Declared:
    return Declared(name, Kind.COUNTER, row, text, labels, values)


def _gauge(name: str, row: Row, text: str, *labels: str) -> Declared:
    return Declared(name, Kind.GAUGE, row, text, labels)


def _histogram(name: str, row: Row, text: str, *labels: str, values: tuple[str, ...] = ()) -> Declared:
    return Declared(name, Kind.HISTOGRAM, row, text, labels, values)


# --- pushes

VERSIONS = _gauge("weighbridge_versions", Row.PUSHES, "Versions this process knows of.", "state")
PUSHES = _counter(
    "weighbridge_pushes_total",
    Row.PUSHES,
    "Pushes that have ended here, by how.",
    "outcome",
    values=("published", "handed over", "failed", "aborted"),
)
PUSH_FAILURES = _counter(
    "weighbridge_push_failures_total",
    Row.PUSHES,
    "Pushes that failed or were aborted, by the reason of their error.",
    "reason",
)
PUSH_PHASE = _histogram(
    "weighbridge_push_phase_seconds",
    Row.PUSHES,
    "How long a push was in each phase: open (ranks declare, and the plan is made), planned (it waits for memory), filling (bytes arrive), "
    "sealed (head.json is asked, other replicas are waited for), ready (digests), verified (uploads and publication).",
    "phase",
    values=("open", "planned", "filling", "sealed", "ready", "verified"),
)
PUSH_READY = _histogram(
    "weighbridge_push_ready_seconds", Row.PUSHES, "From the opening of a version until engines could pull it."
)
PUSH_DURABLE = _histogram(
    "weighbridge_push_durable_seconds",
    Row.PUSHES,
    "From the opening of a version until it was in the object store.",
)
EFFECT_FAILURES = _counter(
    "weighbridge_push_effect_failures_total",
    Row.PUSHES,
    "Steps of pushes that failed, most of them calls of the object store; they are tried again.",
    "effect",
)
WAITING_RANKS = _gauge(
    "weighbridge_push_waiting_ranks",
    Row.PUSHES,
    "Ranks that pushes wait for: they have not declared or not sealed.",
)
SILENT = _gauge(
    "weighbridge_push_silent_seconds",
    Row.PUSHES,
    "For how long nothing was heard of the ranks of a push that waits for some; of the one that has waited longest.",
)
UNDURABLE = _gauge(
    "weighbridge_push_undurable_seconds",
    Row.PUSHES,
    "For how long the oldest version has been ready and not durable: it would be lost with this process.",
)
HELD = _gauge(
    "weighbridge_versions_held",
    Row.PUSHES,
    "Versions this process has received that live and latest pass by until they are approved.",
)
PUBLICATIONS = _gauge("weighbridge_publications_running", Row.PUSHES, "Versions being made durable.")

# --- streams of weights

RECEIVED = _counter("weighbridge_received_bytes_total", Row.STREAMS, "Bytes pushed by trainers.", "lane")
SENT = _counter(
    "weighbridge_sent_bytes_total",
    Row.STREAMS,
    "Bytes sent to engines and trainers, or lent to them.",
    "lane",
)
PULL = _histogram(
    "weighbridge_pull_seconds",
    Row.STREAMS,
    "How long streams of pulls and restores took over gRPC, from their requests on; a large pull has several. Not those that broke off.",
)
IN_FLIGHT = _gauge(
    "weighbridge_in_flight_bytes",
    Row.STREAMS,
    "Bytes of the byte budget that streams over gRPC hold.",
    "direction",
)
STREAMS_WAITING = _gauge(
    "weighbridge_streams_waiting",
    Row.STREAMS,
    "Streams over gRPC that wait for room in the byte budget.",
    "direction",
)
LOCAL_CLIENTS = _gauge("weighbridge_local_clients", Row.STREAMS, "Processes connected to the local socket.")

# --- object store

STORE_CALL = _histogram(
    "weighbridge_store_call_seconds",
    Row.STORE,
    "How long small calls of the object store took, those that failed included: heads, manifests, listings. Not files of weights.",
    "operation",
    values=("read", "write", "list"),
)
STORE_ERRORS = _counter(
    "weighbridge_store_errors_total",
    Row.STORE,
    "Small calls of the object store that failed, or were not answered in time.",
    "operation",
    values=("read", "write", "list"),
)
STORE_SILENT = _gauge(
    "weighbridge_store_silent_seconds",
    Row.STORE,
    "For how long the object store has not answered, so that calls fail at once; 0 while it answers.",
)
STORE_FETCHED = _counter(
    "weighbridge_store_fetched_bytes_total",
    Row.STORE,
    "Bytes of weights brought from a remote store into the read cache.",
)
REPLICA_READ = _counter(
    "weighbridge_replica_read_bytes_total",
    Row.STORE,
    "Bytes of weights brought from other replicas into the read cache, of versions that were not durable yet.",
)
CACHE = _gauge("weighbridge_read_cache_bytes", Row.STORE, "Bytes of blocks in the read cache.")
CACHE_BLOCKS = _counter(
    "weighbridge_read_cache_blocks_total", Row.STORE, "Blocks that readers have wanted.", "result"
)
STORE_READERS = _gauge(
    "weighbridge_store_readers", Row.STORE, "Pulls, restores, exports and downloads that read from the store."
)

# --- memory

IMAGES = _gauge("weighbridge_image_bytes", Row.MEMORY, "Bytes of image regions.", "place", "use")
IMAGES_WAITING = _gauge("weighbridge_images_waiting", Row.MEMORY, "Versions that wait for an image.")
BUDGET = _gauge("weighbridge_memory_budget_bytes", Row.MEMORY, "Most bytes of images in memory.")
AVAILABLE = _gauge(
    "weighbridge_memory_available_bytes", Row.MEMORY, "Bytes that each limit on memory leaves.", "limit"
)
REGIONS_MADE = _counter("weighbridge_image_regions_made_total", Row.MEMORY, "Image regions made.")
REGIONS_REUSED = _counter(
    "weighbridge_image_regions_reused_total", Row.MEMORY, "Images in a region used before."
)

# --- retention

DELETED = _counter(
    "weighbridge_deleted_versions_total", Row.RETENTION, "Versions whose objects were deleted."
)
DELETED_BYTES = _counter(
    "weighbridge_deleted_bytes_total", Row.RETENTION, "Bytes of the weights of deleted versions."
)
COLLECTION_FAILURES = _counter(
    "weighbridge_collection_failures_total", Row.RETENTION, "Collections and deletions that failed."
)
QUOTA_USED = _gauge(
    "weighbridge_quota_used",
    Row.RETENTION,
    "What identities and namespaces use of the limits that the policy gives them; stored bytes as this process saw them last.",
    "kind",
    "of",
)
QUOTA_LIMIT = _gauge("weighbridge_quota_limit", Row.RETENTION, "These limits.", "kind", "of")

# --- service

BUILD = _gauge("weighbridge_build_info", Row.SERVICE, "The release that runs; always 1.", "version")
CHECK = _gauge(
    "weighbridge_check_status",
    Row.SERVICE,
    "What each check of /readyz found last: 0 well, 1 a warning, 2 a failure.",
    "check",
)
CALLS = _counter("weighbridge_grpc_calls_total", Row.SERVICE, "gRPC calls that have ended.", "method", "code")
CALL = _histogram(
    "weighbridge_grpc_call_seconds",
    Row.SERVICE,
    "How long gRPC calls took, waits for other ranks included; watches, which last as long as their clients, are left out.",
    "method",
)

ALL: tuple[Declared, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Declared))
"""Every metric, in the order of their declarations."""
