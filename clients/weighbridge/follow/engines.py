"""Interface between an agent and an engine, and what the statuses of an engine's ranks say together.

An engine's own calls are its driver's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge.errors import DeadlineExceeded, FailedPrecondition, WeighbridgeError
from weighbridge.follow.status import Status, label

_POLL_SECONDS = 0.1


class EngineFailed(WeighbridgeError):
    """The engine could not be reached, or did not do what it was asked for."""

    reason = "ENGINE_FAILED"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that lies on the engine's machine.

    Attributes:
        nbytes: bytes that all of the engine's ranks have fetched.
        seconds: how long the slowest of them took.
    """

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Serving:
    """What an engine has.

    Attributes:
        version: number of the version that all of its ranks say they serve; None if they do not know, or say different things.
        broken: why its parameters are of no version; empty if they are.
        model: of which model that version is, as ``namespace/name``; empty if they do not know.
    """

    version: int | None
    broken: str = ""
    model: str = ""


class Engine(Protocol):
    """A running engine. Every method raises `WeighbridgeError` if it cannot do what it should: `EngineFailed`, or what says more."""

    def connect(self) -> None:
        """Tell the engine where versions come from. May be called again, for instance when the engine has been started again."""

    def serving(self) -> Serving:
        """What it has."""

    def prepare(self, version: int) -> Prepared:
        """Have a version brought to the engine's machine while it serves; returns when it is there."""

    def discard(self) -> None:
        """Give back what was prepared."""

    def pause(self) -> None:
        """Let the engine compute nothing until `resume`."""

    def apply(self, version: int, label: str) -> None:
        """Bring what was prepared to the paused engine's parameters.

        Args:
            version: that was prepared.
            label: what the engine shall tell its clients from now on.
        """

    def resume(self) -> None:
        """Let the engine go on, with nothing cached of other weights."""

    def label(self, label: str) -> None:
        """What the engine shall tell its clients that it serves, where an agent has found that out."""


def serving_of(ranks: Sequence[Status], model: str) -> Serving:
    """What an engine has, by what its ranks say of themselves."""
    found = {rank.served for rank in ranks}
    broken = next((rank.broken for rank in ranks if rank.broken), "")
    if len(found) != 1:
        return Serving(None, broken or f"the ranks serve different versions: {', '.join(sorted(found))}")
    name, _, number = found.pop().rpartition("@")
    return Serving(int(number) if name == model else None, broken, name)


def wait_prepared(ask: Callable[[], Sequence[Status]], model: str, number: int, timeout: float) -> Prepared:
    """Wait until all ranks have a version in host memory.

    Args:
        ask: the ranks' statuses.
        model: ``namespace/name``.
        number: the version that they have been told to prepare.
        timeout: seconds.

    Raises:
        FailedPrecondition: a rank cannot take it, or its bytes did not come; says why. Or another version was asked for meanwhile.
        DeadlineExceeded: not in time.
    """
    deadline = time.monotonic() + timeout
    wanted = label(model, number)
    while True:
        ranks = ask()
        problems = [f"rank {i}: {rank.error}" for i, rank in enumerate(ranks) if rank.error]
        if problems:
            raise FailedPrecondition(f"version {number} could not be prepared", details=problems)
        if all(rank.prepared == wanted for rank in ranks):
            return Prepared(sum(rank.nbytes for rank in ranks), max(rank.seconds for rank in ranks))
        if any(wanted not in (rank.preparing, rank.prepared) for rank in ranks):
            raise FailedPrecondition(
                f"someone else has asked this engine for another version than {number}",
                fix="let one agent update an engine",
            )
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"version {number} was not prepared within {timeout:g} s")
        time.sleep(_POLL_SECONDS)
