"""Policy of a push: how long it may block the rank that makes it, and how its failure is handled.

Every method that pushes accepts the policy as the options ``max_hold_s`` and ``on_failure``. This module makes the
decisions, and the clients carry them out.
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
"""Seconds for which a service is retried that was unreachable and has not responded since.

The loop has already waited for it once.
"""
_REACH = 0.75
"""Share of ``max_hold_s`` for which an unreachable service is retried.

In the remaining time the other ranks learn of the failure.
"""


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """Limit on the time for which a push may block the loop that makes it, and handling of its failure.

    Attributes:
        max_hold_s: seconds for which one call may block the rank in total while it waits for the service, other ranks,
            memory and earlier pushes. The copy itself is not a wait. None: each wait has its own timeout.
        on_failure: ``raise``; or ``warn``, which logs why the push was skipped, and lets the loop continue.
    """

    max_hold_s: float | None = None
    on_failure: OnFailure = "raise"

    @staticmethod
    def of(options: Mapping[str, object]) -> HoldPolicy:
        """Return the policy that the options of a push describe. Raises InvalidArgument."""
        seconds, choice = options.get("max_hold_s"), options.get("on_failure", "raise")
        if seconds is not None and not (
            isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        ):
            raise InvalidArgument(
                f"max_hold_s={seconds!r} is not a valid time",
                fix="give a number of seconds above 0, or leave it out",
            )
        if choice not in get_args(OnFailure):
            raise InvalidArgument(f"on_failure={choice!r} is not known", fix="use 'raise' or 'warn'")
        return HoldPolicy(None if seconds is None else float(seconds), cast("OnFailure", choice))

    @property
    def warns(self) -> bool:
        """Whether the loop continues after a failed push."""
        return self.on_failure == "warn"

    def begin(self, *, away: bool = False) -> Hold:
        """Return the hold of one call, which begins now.

        Inside another hold, it has the beginning of that one and does not end later.

        Args:
            away: whether the previous call could not reach the service, so that this one may be skipped too.
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
    """The time for which one call may block its rank.

    Attributes:
        policy: policy of the push.
        until: time until which the call may wait, by the monotonic clock; infinite if it has no limit.
        reach_seconds: maximum number of seconds for which a service that does not respond is retried.
        began: time at which the call began, by the monotonic clock; None if this hold does not belong to a call.
    """

    policy: HoldPolicy = HoldPolicy()
    until: float = math.inf
    reach_seconds: float = math.inf
    began: float | None = None

    @property
    def left(self) -> float:
        """Seconds for which the call may still wait."""
        return max(self.until - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the call may not wait any longer."""
        return self.left <= 0.0

    @property
    def is_bound(self) -> bool:
        """Whether the hold has a limit."""
        return self.until < math.inf

    def retry_seconds(self, wanted: float) -> float:
        """Return the seconds for which an unreachable service is retried, given the client's setting ``wanted``."""
        return min(wanted, self.reach_seconds, self.left * _REACH)

    def call_seconds(self, wanted: float) -> float:
        """Return the deadline of one call. Raises DeadlineExceeded if no time is left for a call."""
        if self.is_over:
            raise self.exceeded("the push was still waiting")
        return min(wanted, self.left)

    def exceeded(self, what: str) -> DeadlineExceeded:
        """Return the error of a call that has blocked its rank for as long as it may."""
        return DeadlineExceeded(
            f"{what} after max_hold_s={self.policy.max_hold_s:g}" if self.policy.max_hold_s is not None else what,
            fix="push a later step; or let pushes hold the trainer for longer",
        )


FREE = Hold()
"""The hold of a call without a limit."""
_current: ContextVar[Hold] = ContextVar("hold", default=FREE)


def current_hold() -> Hold:
    """Return the hold of the current call.

    Outside of calls, and in threads that continue after a call, it is a hold without a limit.
    """
    return _current.get()


@contextmanager
def held(hold: Hold) -> Iterator[None]:
    """Context in which this thread's calls to the service belong to this hold."""
    token = _current.set(hold)
    try:
        yield
    finally:
        _current.reset(token)


def is_away(error: BaseException) -> bool:
    """Whether an error means that the service could not be reached."""
    return isinstance(error, Unavailable)
