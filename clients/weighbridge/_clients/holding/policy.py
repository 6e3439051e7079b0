"""Policy of what a push may cost the loop that makes it: for how long it holds a rank, and what becomes of one that fails.

Every way to push takes it as options, ``max_hold_s`` and ``on_failure``. It is decided here; the clients carry it out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, cast, get_args

from weighbridge.errors import DeadlineExceeded, InvalidArgument, Unavailable

OnFailure = Literal["raise", "warn"]

AGAIN_SECONDS = 3.0
"""For how long a service that was away is tried, until it has answered: the loop has waited for it once already."""
_REACH = 0.75
"""Part of ``max_hold_s`` for which an absent service is tried: in the rest the other ranks learn of it."""


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """Cost that a push may have for the loop that makes it.

    Attributes:
        max_hold_s: seconds for which all waits of one call may hold the rank: for the service, for other ranks, for memory, for earlier pushes.
            The copy itself is not a wait. None is the time-outs of each wait.
        on_failure: ``raise``; or ``warn``, which logs why the push was skipped, and lets the loop go on.
    """

    max_hold_s: float | None = None
    on_failure: OnFailure = "raise"

    @staticmethod
    def of(options: Mapping[str, object]) -> HoldPolicy:
        """The policy that options of a push say. Raises InvalidArgument."""
        seconds, choice = options.get("max_hold_s"), options.get("on_failure", "raise")
        if seconds is not None and not (
            isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        ):
            raise InvalidArgument(
                f"max_hold_s={seconds!r} is no time", fix="give seconds, more than 0; or leave it out"
            )
        if choice not in get_args(OnFailure):
            raise InvalidArgument(f"on_failure={choice!r} is not known", fix="use 'raise' or 'warn'")
        return HoldPolicy(None if seconds is None else float(seconds), cast("OnFailure", choice))

    @property
    def warns(self) -> bool:
        """Whether a failed push lets the loop go on."""
        return self.on_failure == "warn"

    def begin(self, *, away: bool = False) -> Hold:
        """The hold of one call, which begins now. Within another one it has begun with that, and ends no later.

        Args:
            away: whether the service could not be reached by the call before, and this one may be skipped as well.
        """
        outer, now_s = current_hold(), time.monotonic()
        until = math.inf if self.max_hold_s is None else now_s + self.max_hold_s
        return Hold(
            self,
            min(until, outer.until),
            AGAIN_SECONDS if away and self.warns else math.inf,
            now_s if outer.began is None else outer.began,
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """The hold of one call on its rank.

    Attributes:
        policy: what the call may cost.
        until: moment until which it may wait, by the monotonic clock; infinite without a bound.
        reach_seconds: for how long a service that does not answer is tried, at most.
        began: moment at which the call began, by the monotonic clock; None if this is of no call.
    """

    policy: HoldPolicy = HoldPolicy()
    until: float = math.inf
    reach_seconds: float = math.inf
    began: float | None = None

    @property
    def left(self) -> float:
        """Seconds for which it may still wait."""
        return max(self.until - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether it may wait no more."""
        return self.left <= 0.0

    @property
    def is_bound(self) -> bool:
        """Whether there is a bound at all."""
        return self.until < math.inf

    def retry_seconds(self, wanted: float) -> float:
        """For how long an absent service is tried, where ``wanted`` is what the client says."""
        return min(wanted, self.reach_seconds, self.left * _REACH)

    def call_seconds(self, wanted: float) -> float:
        """Deadline of one call. Raises DeadlineExceeded if there is no time for one."""
        if self.is_over:
            raise self.exceeded("the push was still waiting")
        return min(wanted, self.left)

    def exceeded(self, what: str) -> DeadlineExceeded:
        """The error of a call that has held its rank for as long as it may."""
        return DeadlineExceeded(
            f"{what} after max_hold_s={self.policy.max_hold_s:g}"
            if self.policy.max_hold_s is not None
            else what,
            fix="push a later step; or let pushes hold the trainer for longer",
        )


FREE = Hold()
"""The hold of a call without a bound."""
_current: ContextVar[Hold] = ContextVar("hold", default=FREE)


def current_hold() -> Hold:
    """The hold of the call in which this runs; one without a bound elsewhere, and in threads that go on behind a call."""
    return _current.get()


@contextmanager
def held(hold: Hold) -> Iterator[None]:
    """In the block, this thread's calls to the service are of this hold."""
    token = _current.set(hold)
    try:
        yield
    finally:
        _current.reset(token)


def is_away(error: BaseException) -> bool:
    """Whether an error says that the service could not be reached."""
    return isinstance(error, Unavailable)
