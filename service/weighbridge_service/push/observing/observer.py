"""Observer of one push: reports the duration of each phase, the effects carried out and the outcome to metrics and
traces.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from opentelemetry.trace import Span

from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.observing.push_spans import PushSpans


class PushFigures(Protocol):
    """Metrics of all pushes. Callable from any thread."""

    def effect_failed(self, effect: str) -> None:
        """Count a failure of an effect of this kind."""

    def phase_ended(self, phase: str, seconds: float) -> None:
        """Record that a push has left a phase after this many seconds."""

    def version_ready(self, seconds: float) -> None:
        """Record that a version became ready, this many seconds after it was opened."""

    def version_durable(self, seconds: float) -> None:
        """Record that a version became durable, this many seconds after it was opened."""

    def push_ended(self, phase: str, reason: str) -> None:
        """Count a push that has ended in this phase. ``reason`` is that of the error which ended it, or empty."""


class PushObserver:
    """Observer of the steps and effects of a push.

    The session calls `stepped` once at a time, and `carrying_out` from any thread.

    Args:
        figures: metrics of all pushes.
        state: state in which this replica begins or takes over the push.
        began: when it did.
    """

    def __init__(self, figures: PushFigures, state: PushState, began: Moment) -> None:
        self._figures = figures
        self._entered = began
        self._spans = PushSpans(state)

    def carrying_out(self, effect: do.Effect) -> AbstractContextManager[Span]:
        """Span of an effect, which is carried out inside the block."""
        return self._spans.carrying_out(effect)

    def stepped(self, before: PushState, after: PushState, event: on.Event, now: Moment) -> None:
        """Report a step from one state to another."""
        match event:
            # requests for an image fail many times while memory is short
            case on.EffectFailed(effect, _) if not isinstance(effect, do.AcquireImage):
                self._figures.effect_failed(type(effect).__name__)
        if after.phase is before.phase:
            return
        self._figures.phase_ended(before.phase.value, now.seconds - self._entered.seconds)
        self._entered = now
        opened_ms = after.opened.create_time_ms
        if after.ready_ms and not before.ready_ms:
            self._figures.version_ready(max(after.ready_ms - opened_ms, 0) / 1000)
        if after.phase is Phase.PUBLISHED:
            self._figures.version_durable(max(after.durable_ms - opened_ms, 0) / 1000)
        if after.phase in FINAL:
            failed = after.phase in (Phase.FAILED, Phase.ABORTED) and after.error is not None
            self._figures.push_ended(after.phase.value, after.error.reason if failed and after.error else "")
        self._spans.stepped(before, after)
