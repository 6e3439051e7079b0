"""Cases of the alerts: series with which each fires, and others with which it does not.

Series are written as in Prometheus' tests of rules, a value a minute: ``0+60x10`` is 0, 60, and so on up to 600.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BUILD = {'weighbridge_build_info{instance="a", version="1"}': "1x60"}


@dataclass(frozen=True)
class Case:
    """One alert over series.

    Attributes:
        fires: series with which it fires at minute ``at``.
        labels: of the alert that fires.
        quiet: series with which it does not.
        at: the minute.
    """

    fires: Mapping[str, str]
    quiet: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=lambda: {"instance": "a"})
    at: int = 30


def _of(series: str, fires: str, quiet: str, *, at: int = 30, **labels: str) -> Case:
    return Case({series: fires}, {series: quiet}, {"instance": "a", **labels}, at)


_READY = 'weighbridge_push_ready_seconds_bucket{instance="a", le="%s"}'
_ENGINES = 'weighbridge_engines{instance="a", model="acme/smol", state="%s", standing="%s"}'
_OF_MODEL = {"instance": "a", "model": "acme/smol"}
_PROVED = 'weighbridge_engines_proved{instance="a", model="acme/smol", verdict="%s"}'
CASES: Mapping[str, Case] = {
    "WeighbridgeAbsent": Case({'other{instance="a"}': "1x60"}, BUILD, labels={}),
    "WeighbridgeStoreSilent": _of('weighbridge_store_silent_seconds{instance="a"}', "0 60 120 180", "0x60", at=3),
    "WeighbridgeCheckFailed": _of(
        'weighbridge_check_status{instance="a", check="store-writable"}',
        "0x9 2x60",
        "1x60",
        check="store-writable",
    ),
    # a version that takes five minutes to become durable, one after another
    "WeighbridgeNotDurable": _of('weighbridge_push_undurable_seconds{instance="a"}', "0+60x60", "0 300 0 300x60"),
    "WeighbridgeProofFailed": _of(
        'weighbridge_engine_proofs_total{instance="a", outcome="failed"}',
        "0x20 1x40",
        "7x60",
        outcome="failed",
    ),
    "WeighbridgePushFailed": _of(
        'weighbridge_pushes_total{instance="a", outcome="failed"}', "0x25 1x40", "1x60", outcome="failed"
    ),
    "WeighbridgePushWaitsForRanks": _of('weighbridge_push_silent_seconds{instance="a"}', "0+10x60", "60x60"),
    "WeighbridgePushSlow": Case(
        {_READY % "300": "0x60", _READY % "600": "0+1x60", _READY % "+Inf": "0+1x60"},
        {_READY % "300": "0+1x60", _READY % "600": "0+1x60", _READY % "+Inf": "0+1x60"},
    ),
    "WeighbridgeStepsFail": _of(
        'weighbridge_push_effect_failures_total{instance="a", effect="Upload"}',
        "0+2x60",
        "0x20 2x40",
        effect="Upload",
    ),
    # the ref moves every minute, and each time it takes the engine half of it to follow
    "WeighbridgeEngineBehind": _of(
        'weighbridge_engine_behind_seconds{instance="a", model="acme/smol"}',
        "0x5 300+60x60",
        "30x60",
        model="acme/smol",
    ),
    "WeighbridgeEngineFailing": Case(
        # it is tried again, and fails
        {_ENGINES % ("failing", "behind"): "_x9 " + "1 _ " * 30},
        {
            # it fails once, and then not again
            _ENGINES % ("failing", "behind"): "_x26 1 1 _x40",
            _ENGINES % ("serving", "current"): "9x60",
            _ENGINES % ("failing", "gone"): "1x60",
        },
        labels=_OF_MODEL,
    ),
    "WeighbridgeEngineStale": Case(
        {_ENGINES % ("serving", "stale"): "0x26 1x3 0x60", _ENGINES % ("serving", "gone"): "0x29 1x60"},
        # a deployment is taken down
        {_ENGINES % ("ended", "gone"): "0x20 8x40", _ENGINES % ("serving", "behind"): "8x20 0x40"},
        labels=_OF_MODEL,
    ),
    "WeighbridgeNotProved": Case(
        {_PROVED % "not proved": "2x60"},
        # an engine wakes up and is proved; of others no proof was asked for
        {_PROVED % "not proved": "1x12 0x48", _PROVED % "not asked": "5x60", _PROVED % "proved": "9x60"},
        labels=_OF_MODEL,
    ),
    "WeighbridgeStoreErrors": _of(
        'weighbridge_store_errors_total{instance="a", operation="read"}', "0+30x60", "0+1x60"
    ),
    "WeighbridgeMemoryWaits": _of('weighbridge_images_waiting{instance="a"}', "2x60", "0 1 0 1 0x60"),
    "WeighbridgeMemoryShort": _of(
        'weighbridge_memory_available_bytes{instance="a", limit="cgroup"}', "1000000x60", "9000000000x60"
    ),
    "WeighbridgeStreamsWait": _of('weighbridge_streams_waiting{instance="a", direction="in"}', "3x60", "0 9 0x60"),
    "WeighbridgeCallsRefused": _of(
        'weighbridge_grpc_calls_total{instance="a", method="Pull", code="RESOURCE_EXHAUSTED"}',
        "0+600x60",
        "0+6x60",
    ),
    "WeighbridgeCollectionFails": _of('weighbridge_collection_failures_total{instance="a"}', "0x20 1x40", "5x60"),
    "WeighbridgeQuotaNearlyUsed": Case(
        {
            'weighbridge_quota_used{instance="a", kind="stored", of="acme"}': "95x60",
            'weighbridge_quota_limit{instance="a", kind="stored", of="acme"}': "100x60",
        },
        {
            'weighbridge_quota_used{instance="a", kind="stored", of="acme"}': "80x60",
            'weighbridge_quota_limit{instance="a", kind="stored", of="acme"}': "100x60",
            # streams may all be used: who has none left waits for one
            'weighbridge_quota_used{instance="a", kind="streams", of="trainer"}': "4x60",
            'weighbridge_quota_limit{instance="a", kind="streams", of="trainer"}': "4x60",
        },
        labels={"instance": "a", "kind": "stored", "of": "acme"},
    ),
    "WeighbridgeVersionHeld": _of('weighbridge_versions_held{instance="a"}', "1x60", "0 1 0x60"),
}
