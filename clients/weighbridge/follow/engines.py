"""What an agent asks of an engine; the engine's own calls are its driver's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weighbridge.errors import WeighbridgeError


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
    """

    version: int | None
    broken: str = ""


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
