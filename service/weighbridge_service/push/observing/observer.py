"""Observer of one push: tells metrics and traces how long it was in each phase, what was done meanwhile, and how it has ended."""

from __future__ import annotations

from contextlib import AbstractContextManager

from weighbridge._tracing.span import Span
from weighbridge_service.metrics.instruments import PushInstruments
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.observing.push_spans import PushSpans


class PushObserver:
    """Sees each step of a push. To be told of one at a time; effects, from any thread.

    Args:
        figures: of all pushes.
        state: of the push as this replica takes it up.
        began: when.
    """

    def __init__(self, figures: PushInstruments, state: PushState, began: Moment) -> None:
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
                self._figures.effect_failures.labels(type(effect).__name__).inc()
        if after.phase is before.phase:
            return
        self._figures.phase.labels(before.phase.value).observe(now.seconds - self._entered.seconds)
        self._entered = now
        opened_ms = after.opened.create_time_ms
        if after.ready_ms and not before.ready_ms:
            self._figures.ready.observe(max(after.ready_ms - opened_ms, 0) / 1000)
        if after.phase is Phase.PUBLISHED:
            self._figures.durable.observe(max(after.durable_ms - opened_ms, 0) / 1000)
        if after.phase in FINAL:
            self._figures.outcomes.labels(after.phase.value).inc()
            if after.phase in (Phase.FAILED, Phase.ABORTED) and after.error is not None:
                self._figures.failures.labels(after.error.reason).inc()
        self._spans.stepped(before, after)
