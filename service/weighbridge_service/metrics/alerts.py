"""Alerts: when an operator is called, and what the runbook is. `docs/metrics.md` has a section for each, of its name."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weighbridge_service.metrics import declared as m

RUNBOOKS = "docs/metrics.md"


class Severity(enum.StrEnum):
    """How soon somebody has to look."""

    CRITICAL = "critical"
    """Now: weights may be lost, or nobody is served."""
    WARNING = "warning"
    """Today: something waits, or will fail if nothing is done."""
    INFO = "info"
    """Somebody has a decision to make."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: CamelCase, beginning with ``Weighbridge``.
        severity: how soon somebody has to look.
        expression: in PromQL; fires for each series that it gives.
        lasting: for how long it has to hold, as Prometheus writes durations.
        summary: what is wrong, with Prometheus' templates for labels and the value.
    """

    name: str
    severity: Severity
    expression: str
    lasting: str
    summary: str

    @property
    def anchor(self) -> str:
        """The runbook's section, as a fragment of the page."""
        return self.name.lower()


ALERTS: tuple[Alert, ...] = (
    Alert(
        "WeighbridgeAbsent",
        Severity.CRITICAL,
        f"absent({m.BUILD.name})",
        "2m",
        "no service of Weighbridge tells Prometheus anything",
    ),
    Alert(
        "WeighbridgeStoreSilent",
        Severity.CRITICAL,
        f"{m.STORE_SILENT.name} > 0",
        "30s",
        "the object store has not answered {{ $labels.instance }} for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "WeighbridgeCheckFailed",
        Severity.CRITICAL,
        f'{m.CHECK.name}{{check!="accepting"}} == 2',
        "1m",
        "the check {{ $labels.check }} of {{ $labels.instance }} fails",
    ),
    Alert(
        "WeighbridgeNotDurable",
        Severity.CRITICAL,
        f"{m.UNDURABLE.name} > 600",
        "0m",
        "a version has been in the memory of {{ $labels.instance }} alone for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "WeighbridgePushFailed",
        Severity.WARNING,
        f'increase({m.PUSHES.name}{{outcome="failed"}}[10m]) > 0',
        "0m",
        "a push to {{ $labels.instance }} has failed",
    ),
    Alert(
        "WeighbridgePushWaitsForRanks",
        Severity.WARNING,
        f"{m.SILENT.name} > 120",
        "0m",
        "a push to {{ $labels.instance }} has heard nothing of its ranks for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "WeighbridgePushSlow",
        Severity.WARNING,
        f"histogram_quantile(0.9, sum by (instance, le) (rate({m.PUSH_READY.name}_bucket[30m]))) > 300",
        "5m",
        "one push in ten to {{ $labels.instance }} takes longer than {{ $value | humanizeDuration }} until engines can pull it",
    ),
    Alert(
        "WeighbridgeStepsFail",
        Severity.WARNING,
        f"increase({m.EFFECT_FAILURES.name}[10m]) > 10",
        "0m",
        "{{ $labels.effect }} of pushes to {{ $labels.instance }} fails again and again",
    ),
    Alert(
        "WeighbridgeStoreErrors",
        Severity.WARNING,
        f"sum by (instance) (rate({m.STORE_ERRORS.name}[5m])) > 0.1",
        "5m",
        "calls of the object store from {{ $labels.instance }} fail",
    ),
    Alert(
        "WeighbridgeMemoryWaits",
        Severity.WARNING,
        f"{m.IMAGES_WAITING.name} > 0",
        "2m",
        "{{ $value }} versions wait for memory of {{ $labels.instance }}",
    ),
    Alert(
        "WeighbridgeMemoryShort",
        Severity.WARNING,
        f"min by (instance) ({m.AVAILABLE.name}) < {1 << 30}",
        "5m",
        "{{ $labels.instance }} has {{ $value | humanize1024 }}B of memory left",
    ),
    Alert(
        "WeighbridgeStreamsWait",
        Severity.WARNING,
        f"sum by (instance) ({m.STREAMS_WAITING.name}) > 0",
        "5m",
        "{{ $value }} streams of weights wait for the byte budget of {{ $labels.instance }}",
    ),
    Alert(
        "WeighbridgeCallsRefused",
        Severity.WARNING,
        f'sum by (instance) (rate({m.CALLS.name}{{code="RESOURCE_EXHAUSTED"}}[5m])) > 1',
        "5m",
        "{{ $labels.instance }} refuses {{ $value | humanize }} calls a second",
    ),
    Alert(
        "WeighbridgeCollectionFails",
        Severity.WARNING,
        f"increase({m.COLLECTION_FAILURES.name}[1h]) > 0",
        "0m",
        "old versions could not be deleted by {{ $labels.instance }}",
    ),
    Alert(
        "WeighbridgeQuotaNearlyUsed",
        Severity.WARNING,
        f'{m.QUOTA_USED.name}{{kind="stored"}} / {m.QUOTA_LIMIT.name}{{kind="stored"}} > 0.9',
        "10m",
        "{{ $labels.of }} uses {{ $value | humanizePercentage }} of its bytes in the store",
    ),
    Alert(
        "WeighbridgeVersionHeld",
        Severity.INFO,
        f"{m.HELD.name} > 0",
        "10m",
        "{{ $value }} versions of {{ $labels.instance }} wait for approval",
    ),
)
"""All alerts, the most urgent first."""
