"""Outcome of relaying one step."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Relayed(JsonValue):
    """One step that was relayed, or an attempt at it.

    Attributes:
        model: ``namespace/name``.
        step: the training step; None if the folder of all steps cannot be read.
        folder: its folder.
        version: number of its version at the service; None if it has none.
        nbytes: bytes of its tensors; 0 if nothing had to be moved.
        seconds: duration of the attempt.
        error: why it failed; empty if it did not.
    """

    model: str
    step: int | None
    folder: str
    version: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
