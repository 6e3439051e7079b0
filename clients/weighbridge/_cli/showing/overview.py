"""Overview of a service's activity, derived from readings: pushes with their rates, versions, models, engines, memory.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weighbridge._core.engines.facts import Engine
from weighbridge._core.json_values import JsonValue
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import Model, Version, refs_of
from weighbridge._core.text.counts import percent

Place = tuple[str, int]
"""A model and a version's number."""


@dataclass(frozen=True, slots=True)
class MemoryUse(JsonValue):
    """Memory use of a service, in bytes.

    Attributes:
        images: versions in memory.
        budget: limit of ``images``.
        disk: versions in the scratch folder.
        in_flight: bytes in transit through gRPC, by direction.
        byte_budget: limit of ``in_flight``.
    """

    images: int
    budget: int
    disk: int
    in_flight: Mapping[str, int] = field(hash=False)
    byte_budget: int


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of a service at one time.

    Attributes:
        at_s: monotonic clock, in seconds.
        time_ms: Unix time in milliseconds.
        models: models that this client may see.
        versions: newest versions of each model, including those being received and those that failed recently.
        ranks: progress of each rank for versions that are being received.
        engines: engines that have reported.
        memory: None if the HTTP endpoint was not read.
    """

    at_s: float
    time_ms: int
    models: tuple[Model, ...] = ()
    versions: tuple[Version, ...] = ()
    ranks: Mapping[Place, tuple[RankProgress, ...]] = field(default_factory=dict)
    engines: tuple[Engine, ...] = ()
    memory: MemoryUse | None = None


@dataclass(frozen=True, slots=True)
class PushingRank(JsonValue):
    """A rank of a push.

    Attributes:
        progress: its progress.
        rate: bytes a second since the previous reading; None if there was none.
    """

    progress: RankProgress
    rate: float | None


@dataclass(frozen=True, slots=True)
class Push(JsonValue):
    """A version that is being received.

    Attributes:
        version: its current state.
        rate: bytes a second since the previous reading; None if there was none.
        left_s: seconds until all bytes have arrived, at this rate; None if not known.
        ranks: the ranks; empty if the replica that responded does not know them.
    """

    version: Version
    rate: float | None
    left_s: float | None
    ranks: tuple[PushingRank, ...]

    @property
    def percent(self) -> int:
        """Percentage of its bytes that have arrived."""
        return percent(self.version.received_bytes, self.version.tensor_bytes)


@dataclass(frozen=True, slots=True)
class Past(JsonValue):
    """A version that is complete, or was aborted.

    Attributes:
        version: its current state.
        refs: refs that name it.
        ready_s: seconds from its opening until it was ready; None if not known.
        durable_s: seconds from its opening until it was durable; None if not known.
    """

    version: Version
    refs: tuple[str, ...]
    ready_s: float | None
    durable_s: float | None


@dataclass(frozen=True, slots=True)
class Overview(JsonValue):
    """Overview of a service.

    Attributes:
        server: its address.
        time_ms: when it was read, Unix time in milliseconds.
        pushes: versions that are being received, the oldest first.
        versions: others, the newest first.
        models: by name.
        engines: by model.
        memory: None if it was not read.
        away_s: time since the service became unreachable; 0 if it responds.
        away_reason: why it is unreachable.
    """

    server: str
    time_ms: int
    pushes: tuple[Push, ...]
    versions: tuple[Past, ...]
    models: tuple[Model, ...]
    engines: tuple[Engine, ...]
    memory: MemoryUse | None
    away_s: float = 0.0
    away_reason: str = ""


def overview(
    server: str, before: ServiceState | None, now: ServiceState, *, away_s: float = 0.0, away_reason: str = ""
) -> Overview:
    """Create an overview from a reading, with rates since the previous one.

    Args:
        server: its address.
        before: the previous reading; None if there was none, in which case rates are unknown.
        now: the newest reading.
        away_s: how long the service has been unreachable since then.
        away_reason: why it is unreachable.
    """
    refs = {model.name: model.refs for model in now.models}
    receiving = unfinished(now.versions)
    others = [version for version in now.versions if not version.state.receiving]
    return Overview(
        server,
        now.time_ms,
        tuple(_push(version, before, now) for version in sorted(receiving, key=_opened)),
        tuple(
            Past(
                version,
                refs_of(refs.get(version.model, {}), version.number),
                version.ready_seconds,
                version.durable_seconds,
            )
            for version in sorted(others, key=_opened, reverse=True)
        ),
        now.models,
        now.engines,
        now.memory,
        away_s,
        away_reason,
    )


def _opened(version: Version) -> tuple[int, str, int]:
    return version.create_time_ms, version.model, version.number


def _push(version: Version, before: ServiceState | None, now: ServiceState) -> Push:
    place = version.model, version.number
    seconds = now.at_s - before.at_s if before is not None else 0.0
    earlier = {(each.model, each.number): each.received_bytes for each in (before.versions if before else ())}
    ranks = {each.rank: each.received_bytes for each in (before.ranks.get(place, ()) if before else ())}
    rate = _rate(earlier.get(place), version.received_bytes, seconds)
    missing = version.tensor_bytes - version.received_bytes
    return Push(
        version,
        rate,
        missing / rate if rate and missing > 0 else None,
        tuple(
            PushingRank(each, _rate(ranks.get(each.rank), each.received_bytes, seconds))
            for each in now.ranks.get(place, ())
        ),
    )


def _rate(before: int | None, now: int, seconds: float) -> float | None:
    return None if before is None or seconds <= 0 else max(now - before, 0) / seconds


def unfinished(versions: Sequence[Version]) -> list[Version]:
    """Versions that are being received; the progress of each rank is read for them."""
    return [each for each in versions if each.state.receiving]
