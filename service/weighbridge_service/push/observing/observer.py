"""Observer of one push: tells metrics and traces how long it was in each phase, what was done meanwhile, and how it has ended."""

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
    """Figures of all pushes. Called from any thread."""

    def effect_failed(self, effect: str) -> None:
        """An effect of this kind has failed."""

    def phase_ended(self, phase: str, seconds: float) -> None:
        """A push has left a phase after this long."""

    def version_ready(self, seconds: float) -> None:
        """A version is ready, this long after it was opened."""

    def version_durable(self, seconds: float) -> None:
        """A version is durable, this long after it was opened."""

    def push_ended(self, phase: str, reason: str) -> None:
        """A push has ended in this phase. ``reason`` is that of the error which ended it, or empty."""


class PushObserver:
    """Sees each step of a push. To be told of one at a time; effects, from any thread.

    Args:
        figures: of all pushes.
        state: of the push as this replica takes it up.
        began: when.
    """

    def __init__(self, figures: PushFigures, state: PushState, began: Moment) -> None:
        self._figures = figures
        self._entered = began
        self._spans = PushSpans(state)

    def carrying_out(self, effect: do.Effect) -> AbstractContextManager[Span]:
        """An effect is carried out for as long as the block runs."""
        return self._spans.carrying_out(effect)

    def stepped(self, before: PushState, after: PushState, event: on.Event, now: Moment) -> None:
        """An event has led from one state to another."""
        match event:
            # memory that is not there yet is asked for all the time
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
