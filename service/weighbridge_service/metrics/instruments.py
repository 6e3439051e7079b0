"""Instruments that parts of the service update as events happen. Thread-safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram
from prometheus_client.registry import Collector

from weighbridge_service.metrics import declared


@dataclass(frozen=True, slots=True)
class PushInstruments:
    """Figures of pushes.

    Attributes:
        outcomes, failures, effect_failures: counts.
        phase, ready, durable: durations.
    """

    outcomes: Counter = field(default_factory=declared.PUSHES.counter)
    failures: Counter = field(default_factory=declared.PUSH_FAILURES.counter)
    effect_failures: Counter = field(default_factory=declared.EFFECT_FAILURES.counter)
    phase: Histogram = field(default_factory=declared.PUSH_PHASE.histogram)
    ready: Histogram = field(default_factory=declared.PUSH_READY.histogram)
    durable: Histogram = field(default_factory=declared.PUSH_DURABLE.histogram)

    def __iter__(self) -> Iterator[Collector]:
        yield from (self.outcomes, self.failures, self.effect_failures, self.phase, self.ready, self.durable)

    def effect_failed(self, effect: str) -> None:
        """See `PushFigures`."""
        self.effect_failures.labels(effect).inc()

    def phase_ended(self, phase: str, seconds: float) -> None:
        """See `PushFigures`."""
        self.phase.labels(phase).observe(seconds)

    def version_ready(self, seconds: float) -> None:
        """See `PushFigures`."""
        self.ready.observe(seconds)

    def version_durable(self, seconds: float) -> None:
        """See `PushFigures`."""
        self.durable.observe(seconds)

    def push_ended(self, phase: str, reason: str) -> None:
        """See `PushFigures`."""
        self.outcomes.labels(phase).inc()
        if reason:
            self.failures.labels(reason).inc()


@dataclass(frozen=True, slots=True)
class CallInstruments:
    """Figures of gRPC calls.

    Attributes:
        ended: a count.
        seconds, pulls: durations.
    """

    ended: Counter = field(default_factory=declared.CALLS.counter)
    seconds: Histogram = field(default_factory=declared.CALL.histogram)
    pulls: Histogram = field(default_factory=declared.PULL.histogram)

    def __iter__(self) -> Iterator[Collector]:
        yield from (self.ended, self.seconds, self.pulls)

    def count(self, method: str, code: str, seconds: float | None = None) -> None:
        """Count a call that has ended.

        Args:
            method: name of the gRPC method.
            code: name of the status code.
            seconds: duration; None if it depends only on the client.
        """
        self.ended.labels(method, code).inc()
        if seconds is not None:
            self.seconds.labels(method).observe(seconds)
            if method in ("Pull", "Restore") and code == "OK":
                self.pulls.observe(seconds)


@dataclass(frozen=True, slots=True)
class RequestInstruments:
    """Figures of HTTP requests that a route has handled.

    Attributes:
        answered: a count.
        seconds: durations.
    """

    answered: Counter = field(default_factory=declared.REQUESTS.counter)
    seconds: Histogram = field(default_factory=declared.REQUEST.histogram)

    def __iter__(self) -> Iterator[Collector]:
        yield from (self.answered, self.seconds)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a request whose response began, or failed to begin, after this many seconds."""
        self.answered.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)


@dataclass(frozen=True, slots=True)
class StoreInstruments:
    """Figures of small calls of the object store.

    Attributes:
        seconds: durations.
        errors: a count.
    """

    seconds: Histogram = field(default_factory=declared.STORE_CALL.histogram)
    errors: Counter = field(default_factory=declared.STORE_ERRORS.counter)

    def __iter__(self) -> Iterator[Collector]:
        yield from (self.seconds, self.errors)

    def count(self, operation: str, seconds: float, failed: bool) -> None:
        """Count a call that has ended, or that its caller has stopped waiting for."""
        self.seconds.labels(operation).observe(seconds)
        if failed:
            self.errors.labels(operation).inc()
