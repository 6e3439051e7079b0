"""Observer of one push: tells metrics and traces how long it was in each phase, what was done meanwhile, and how it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weighbridge._tracing import spans
from weighbridge._tracing.span import Span
from weighbridge.errors import WeighbridgeError
from weighbridge_service.metrics.instruments import PushInstruments
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.state import Moment, PushState

_EFFECTS: dict[type[do.Effect], str] = {
    do.MakePlan: "plan",
    do.Claim: "claim",
    do.Confirm: "confirm",
    do.Digest: "digest",
    do.CompareSample: "compare",
    do.Upload: "upload",
    do.UploadDigests: "upload_digests",
    do.HandIn: "hand_in",
    do.HandOver: "hand_over",
    do.WriteManifestAndPublish: "publish",
}
"""Effects that traces show. The others are questions that are asked again and again."""
_PERIODS: tuple[tuple[str, frozenset[Phase]], ...] = (
    ("receive", INCOMPLETE),
    ("allocate", frozenset((Phase.PLANNED,))),
    ("ready", frozenset((Phase.SEALED,))),
    ("durable", VISIBLE),
    ("verify", frozenset((Phase.READY,))),
)
"""Spans of a push, and the phases for which each lasts; those that lie in another one behind it."""
_COURSE = (Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED, Phase.READY, Phase.VERIFIED)
_OUTER = {"allocate": "receive", "ready": "receive", "verify": "durable"}


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
        self._open: dict[str, Span] = {}
        self._traced = state.opened.traceparent
        self._trace(state.phase, state)

    @contextmanager
    def carrying_out(self, effect: do.Effect) -> Iterator[Span]:
        """An effect is carried out for as long as the block runs."""
        name, period = _EFFECTS.get(type(effect)), self._period
        if name is None or period is None:
            yield spans.OFF
            return
        file = getattr(effect, "file", "")
        with period.child(f"weighbridge.{name}", {"weighbridge.file": file} if file else {}) as span:
            yield span

    @property
    def _period(self) -> Span | None:
        """The span in which effects are; None if there is none."""
        return next(
            (self._open[name] for name in ("ready", "receive", "durable") if name in self._open), None
        )

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
        for phase in _passed(before.phase, after.phase):
            self._trace(phase, after)
        self._trace(after.phase, after)

    def _trace(self, phase: Phase, state: PushState) -> None:
        """End the spans that do not last for a phase, and begin those that do."""
        if not self._traced:
            return
        error: WeighbridgeError | None = state.error if state.phase in FINAL else None
        for name in [name for name, phases in _PERIODS if phase not in phases and name in self._open]:
            span = self._open.pop(name)
            if error is not None:
                span.fail(error)
            span.end()
        opened = state.opened
        said: dict[str, str | int] = {
            "weighbridge.model": opened.model,
            "weighbridge.version": opened.number,
            "weighbridge.step": opened.step,
        }
        for name, phases in _PERIODS:
            if phase in phases and name not in self._open:
                outer = self._open.get(_OUTER.get(name, ""))
                self._open[name] = (
                    spans.continuing(f"weighbridge.{name}", said, self._traced)
                    if outer is None
                    else outer.begin(f"weighbridge.{name}")
                )


def _passed(before: Phase, after: Phase) -> tuple[Phase, ...]:
    """The phases that lie between two, in which a push was for no time: what it needs there was there before."""
    if after not in VISIBLE or before not in _COURSE:
        return ()
    return _COURSE[_COURSE.index(before) + 1 : _COURSE.index(after)]
