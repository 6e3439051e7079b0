"""Declarations of all metrics: name, kind, meaning and labels.

Tests check that the dashboard, the alerts and docs/metrics.md use exactly these metrics. Names follow Prometheus'
conventions: base units as suffixes, ``_total`` for counters.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from weighbridge._core.engines.step_parts import PARTS


class Kind(enum.StrEnum):
    """Kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


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
"""Upper bounds of the buckets of durations.

They range from a call that reads memory to a push that waits for its ranks.
"""


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """One metric.

    Attributes:
        name: name as exposed; for a histogram, without ``_bucket``, ``_sum`` and ``_count``.
        kind: kind of the metric.
        text: help text.
        labels: names of its labels.
        values: values of its only label. They are exposed from the start, because a counter that appears with its first
            increment does not show an increase.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def family(self, samples: Mapping[str, float] | float) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric as a family with current values: one value, or one for each value of its only label."""
        if isinstance(samples, Mapping):
            return self.families([((label,), value) for label, value in samples.items()])
        return self.families([((), samples)])

    def families(self, samples: Sequence[tuple[tuple[str, ...], float]]) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric as a family with current values, each with its label values."""
        of_kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        found = of_kind(self.name, self.text, labels=self.labels)
        for labels, value in samples:
            found.add_metric(labels, value)
        return found

    def counter(self) -> Counter:
        """A new counter of the metric."""
        found = Counter(self.name, self.text, self.labels, registry=None)
        for value in self.values:
            found.labels(value)
        return found

    def histogram(self) -> Histogram:
        """A new histogram of the metric."""
        found = Histogram(self.name, self.text, self.labels, registry=None, buckets=SECONDS)
        for value in self.values:
            found.labels(value)
        return found


def _counter(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> DeclaredMetric:
    return DeclaredMetric(name, Kind.COUNTER, text, labels, values)


def _gauge(name: str, text: str, *labels: str) -> DeclaredMetric:
    return DeclaredMetric(name, Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> DeclaredMetric:
    return DeclaredMetric(name, Kind.HISTOGRAM, text, labels, values)


# --- pushes

VERSIONS = _gauge("weighbridge_versions", "Versions this process knows of.", "state")
PUSHES = _counter(
    "weighbridge_pushes_total",
    "Pushes that have ended here, by how.",
    "outcome",
    values=("published", "handed over", "failed", "aborted"),
)
PUSH_FAILURES = _counter(
    "weighbridge_push_failures_total",
    "Pushes that failed or were aborted, by the reason of their error.",
    "reason",
)
PUSH_PHASE = _histogram(
    "weighbridge_push_phase_seconds",
    "How long a push was in each phase: open (ranks declare, and the plan is made), planned "
    "(it waits for memory), filling (bytes arrive), "
    "sealed (head.json is asked, other replicas are waited for), ready (digests), verified (uploads and publication).",
    "phase",
    values=("open", "planned", "filling", "sealed", "ready", "verified"),
)
PUSH_READY = _histogram("weighbridge_push_ready_seconds", "From the opening of a version until engines could pull it.")
PUSH_DURABLE = _histogram(
    "weighbridge_push_durable_seconds", "From the opening of a version until it was in the object store."
)
EFFECT_FAILURES = _counter(
    "weighbridge_push_effect_failures_total",
    "Steps of pushes that failed, most of them calls of the object store; they are retried.",
    "effect",
)
WAITING_RANKS = _gauge(
    "weighbridge_push_waiting_ranks", "Ranks that pushes wait for: they have not declared or not sealed."
)
SILENT = _gauge(
    "weighbridge_push_silent_seconds",
    "For how long no rank of a push that waits for ranks was active; of the push that has waited longest.",
)
UNDURABLE = _gauge(
    "weighbridge_push_undurable_seconds",
    "For how long the oldest version has been ready and not durable: it would be lost with this process.",
)
HELD = _gauge(
    "weighbridge_versions_held",
    "Versions this process has received that live and latest skip until they are approved.",
)
PUBLICATIONS = _gauge("weighbridge_publications_running", "Versions being made durable.")

# --- streams of weights

RECEIVED = _counter("weighbridge_received_bytes_total", "Bytes pushed by trainers.", "lane")
SENT = _counter("weighbridge_sent_bytes_total", "Bytes sent to engines and trainers, or read by them in place.", "lane")
PULL = _histogram(
    "weighbridge_pull_seconds",
    (
        "How long streams of pulls and restores took over gRPC, from their requests on; a large "
        "pull has several. Interrupted streams are left out."
    ),
)
IN_FLIGHT = _gauge("weighbridge_in_flight_bytes", "Bytes of the byte budget that streams over gRPC hold.", "direction")
STREAMS_WAITING = _gauge(
    "weighbridge_streams_waiting", "Streams over gRPC that wait for room in the byte budget.", "direction"
)
LOCAL_CLIENTS = _gauge("weighbridge_local_clients", "Processes connected to the local socket.")

# --- engines

ENGINES = _gauge(
    "weighbridge_engines",
    "Engines that have reported to this process recently, as `weighbridge engines` shows them.",
    "model",
    "standing",
    "state",
)
ENGINES_BEHIND = _gauge(
    "weighbridge_engine_behind_versions",
    (
        "Versions behind the one that an engine serves, up to the one that its ref names; of the "
        "engine that is farthest behind."
    ),
    "model",
)
ENGINES_BEHIND_FOR = _gauge(
    "weighbridge_engine_behind_seconds",
    "For how long an engine that is behind its ref has had no update that succeeded, or its "
    "agent has run without one; of the longest. "
    "0 while none is behind.",
    "model",
)
ENGINES_SILENT = _gauge(
    "weighbridge_engine_silent_seconds",
    (
        "For how long the agent of an engine has not reported; of the longest, until it is "
        "forgotten. Engines that have ended are left out."
    ),
    "model",
)
ENGINES_UPDATE = _gauge(
    "weighbridge_engine_update_seconds",
    (
        "How long the last update of an engine took, while it served (prepare) and while it stood "
        "still (pause); of the slowest."
    ),
    "model",
    "part",
)
ENGINE_STEP = _histogram(
    "weighbridge_engine_step_seconds",
    "How long each part of a step took, of each update that an agent has reported to this process: "
    f"{', '.join(each.name for each in PARTS)}. 0 for a part that was below zero, of an engine that had begun early.",
    "part",
)
ENGINE_PROOFS = _counter(
    "weighbridge_engine_proofs_total",
    (
        "Proofs that engines compute with the bytes of a version, as agents have reported them to "
        "this process: proved (in part, too) or failed."
    ),
    "outcome",
    values=("proved", "failed"),
)
ENGINES_PROVED = _gauge(
    "weighbridge_engines_proved",
    "Engines by the verdict of their last proof: proved, proved in part, failed, not proved "
    "(it is due and cannot be made), or not asked "
    "(no proof was ever requested). Engines that are gone are left out.",
    "model",
    "verdict",
)
ENGINES_PROOF_AGE = _gauge(
    "weighbridge_engine_proof_age_seconds",
    "For how long an engine of which proofs are requested has had none, failed ones included; of the longest.",
    "model",
)
ENGINES_PROOF = _gauge(
    "weighbridge_engine_proof_seconds", "How long the last proof of an engine took; of the slowest.", "model"
)
ENGINES_DRIFT = _gauge(
    "weighbridge_engine_golden_drift",
    "Largest difference between the log probabilities that an engine gives golden prompts and "
    "those that its version has; of the engine with the "
    "largest. Absent while no engine has answered any.",
    "model",
)

# --- object store

STORE_CALL = _histogram(
    "weighbridge_store_call_seconds",
    (
        "How long small calls of the object store took, failed calls included: heads, manifests, "
        "listings. Files of weights are left out."
    ),
    "operation",
    values=("read", "write", "list"),
)
STORE_ERRORS = _counter(
    "weighbridge_store_errors_total",
    "Small calls of the object store that failed, or were not answered in time.",
    "operation",
    values=("read", "write", "list"),
)
STORE_SILENT = _gauge(
    "weighbridge_store_silent_seconds",
    "For how long the object store has not answered, so that calls fail at once; 0 while it answers.",
)
STORE_FETCHED = _counter(
    "weighbridge_store_fetched_bytes_total",
    "Bytes of weights brought from a remote store into the read cache.",
)
REPLICA_READ = _counter(
    "weighbridge_replica_read_bytes_total",
    "Bytes of weights brought from other replicas into the read cache, of versions that were not durable yet.",
)
CACHE = _gauge("weighbridge_read_cache_bytes", "Bytes of blocks in the read cache.")
CACHE_BLOCKS = _counter("weighbridge_read_cache_blocks_total", "Blocks that readers have wanted.", "result")
STORE_READERS = _gauge("weighbridge_store_readers", "Pulls, restores, exports and downloads that read from the store.")

# --- memory

IMAGES = _gauge("weighbridge_image_bytes", "Bytes of image regions.", "place", "use")
IMAGES_WAITING = _gauge("weighbridge_images_waiting", "Versions that wait for an image.")
BUDGET = _gauge("weighbridge_memory_budget_bytes", "Most bytes of images in memory.")
AVAILABLE = _gauge("weighbridge_memory_available_bytes", "Bytes of memory that each limit leaves available.", "limit")
REGIONS_MADE = _counter("weighbridge_image_regions_made_total", "Image regions made.")
REGIONS_REUSED = _counter("weighbridge_image_regions_reused_total", "Images in a region used before.")

# --- retention

DELETED = _counter("weighbridge_deleted_versions_total", "Versions whose objects were deleted.")
DELETED_BYTES = _counter("weighbridge_deleted_bytes_total", "Bytes of the weights of deleted versions.")
COLLECTION_FAILURES = _counter("weighbridge_collection_failures_total", "Collections and deletions that failed.")
QUOTA_USED = _gauge(
    "weighbridge_quota_used",
    (
        "What identities and namespaces use of the limits that the policy gives them; stored "
        "bytes as this process saw them last."
    ),
    "kind",
    "of",
)
QUOTA_LIMIT = _gauge("weighbridge_quota_limit", "These limits.", "kind", "of")

# --- service

BUILD = _gauge("weighbridge_build_info", "The running release; always 1.", "version")
CHECK = _gauge(
    "weighbridge_check_status",
    "Last result of each check of /readyz: 0 ok, 1 a warning, 2 a failure.",
    "check",
)
CALLS = _counter("weighbridge_grpc_calls_total", "gRPC calls that have ended.", "method", "code")
CALL = _histogram(
    "weighbridge_grpc_call_seconds",
    (
        "How long gRPC calls took, waits for other ranks included; watches, which last as long as "
        "their clients, are left out."
    ),
    "method",
)
REQUESTS = _counter(
    "weighbridge_http_requests_total",
    "HTTP requests that have been answered, by the route's name and the status.",
    "route",
    "status",
)
REQUEST = _histogram(
    "weighbridge_http_request_seconds",
    "How long HTTP requests took until their answers began.",
    "route",
)

ALL: tuple[DeclaredMetric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, DeclaredMetric))
"""Every metric, in the order of their declarations."""
