"""Observer of one push: tells the metrics how long it was in each phase, and how it has ended."""

from __future__ import annotations

from weighbridge_service.metrics.instruments import PushInstruments
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.machine.state import Moment, PushState


class PushObserver:
    """Sees each step of a push. To be told of one at a time.

    Args:
        figures: of all pushes.
        began: when this replica has taken the push up.
    """

    def __init__(self, figures: PushInstruments, began: Moment) -> None:
        self._figures = figures
        self._entered = began

    def stepped(self, before: PushState, after: PushState, event: on.Event, now: Moment) -> None:
        """An event has led from one state to another."""
        match event:
            # memory that is not there yet is asked for all the time
            case on.EffectFailed(effect, _) if not isinstance(effect, do.AcquireImage):
                self._figures.effect_failures.labels(type(effect).__name__).inc()
        if after.phase is before.phase:
            return
        phase = self._figures.phase.labels(before.phase.value)
        phase.observe(now.seconds - self._entered.seconds)
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
