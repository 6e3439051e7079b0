"""Spans of one push in this process: one for each period of several phases, and those of the effects inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import INVALID_SPAN, Span

from weighbridge._tracing import spans
from weighbridge.errors import WeighbridgeError
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine.phases import FINAL, INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.state import PushState

_PERIODS: tuple[tuple[str, frozenset[Phase]], ...] = (
    ("receive", INCOMPLETE),
    ("allocate", frozenset((Phase.PLANNED,))),
    ("ready", frozenset((Phase.SEALED,))),
    ("durable", VISIBLE),
    ("verify", frozenset((Phase.READY,))),
)
"""Spans of a push, and the phases that each covers; an outer span comes before those inside it."""
_COURSE = (Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED, Phase.READY, Phase.VERIFIED)
_OUTER = {"allocate": "receive", "ready": "receive", "verify": "durable"}


class PushSpans:
    """Spans of a push in the trace of its version; none if the version has no trace.

    The session calls `stepped` once at a time.

    Args:
        state: state in which this replica begins or takes over the push.
    """

    def __init__(self, state: PushState) -> None:
        self._open: dict[str, Span] = {}
        self._traced = state.opened.traceparent
        self._enter(state.phase, state)

    def stepped(self, before: PushState, after: PushState) -> None:
        """End and begin spans after a step from one state to another."""
        for phase in _passed(before.phase, after.phase):
            self._enter(phase, after)
        self._enter(after.phase, after)

    @contextmanager
    def carrying_out(self, effect: do.Effect) -> Iterator[Span]:
        """Span of an effect, which is carried out inside the block. Callable from any thread."""
        period = self._period
        if not effect.SPAN or period is None:
            yield INVALID_SPAN
            return
        file = getattr(effect, "file", "")
        attributes = {"weighbridge.file": file} if file else None
        with spans.child(period, f"weighbridge.{effect.SPAN}", attributes) as span:
            yield span

    @property
    def _period(self) -> Span | None:
        """The span that contains the spans of effects now; None if there is none."""
        return next((self._open[name] for name in ("ready", "receive", "durable") if name in self._open), None)

    def _enter(self, phase: Phase, state: PushState) -> None:
        """End the spans that do not cover a phase, and begin those that do."""
        if not self._traced:
            return
        error: WeighbridgeError | None = state.error if state.phase in FINAL else None
        for name in [name for name, phases in _PERIODS if phase not in phases and name in self._open]:
            span = self._open.pop(name)
            if error is not None:
                spans.fail(span, error)
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
                    else spans.within(outer, f"weighbridge.{name}")
                )


def _passed(before: Phase, after: Phase) -> tuple[Phase, ...]:
    """The phases between two others that a push passed in one step, because their conditions were met already."""
    if after not in VISIBLE or before not in _COURSE:
        return ()
    return _COURSE[_COURSE.index(before) + 1 : _COURSE.index(after)]
