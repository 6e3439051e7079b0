"""Spans of one push in this process: what lasts for some of its phases, and the effects that are carried out meanwhile."""

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
"""Spans of a push, and the phases for which each lasts; those that lie in another one behind it."""
_COURSE = (Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED, Phase.READY, Phase.VERIFIED)
_OUTER = {"allocate": "receive", "ready": "receive", "verify": "durable"}


class PushSpans:
    """The spans, in the trace that the version says; none if it says none. To be told of one step at a time; of effects, from any thread.

    Args:
        state: of the push as this replica takes it up.
    """

    def __init__(self, state: PushState) -> None:
        self._open: dict[str, Span] = {}
        self._traced = state.opened.traceparent
        self._enter(state.phase, state)

    def stepped(self, before: PushState, after: PushState) -> None:
        """The push is in another phase."""
        for phase in _passed(before.phase, after.phase):
            self._enter(phase, after)
        self._enter(after.phase, after)

    @contextmanager
    def carrying_out(self, effect: do.Effect) -> Iterator[Span]:
        """An effect is carried out for as long as the block runs."""
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
        """The span in which effects are; None if there is none."""
        return next(
            (self._open[name] for name in ("ready", "receive", "durable") if name in self._open), None
        )

    def _enter(self, phase: Phase, state: PushState) -> None:
        """End the spans that do not last for a phase, and begin those that do."""
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
    """The phases that lie between two, in which a push was for no time: what it needs there was there before."""
    if after not in VISIBLE or before not in _COURSE:
        return ()
    return _COURSE[_COURSE.index(before) + 1 : _COURSE.index(after)]
