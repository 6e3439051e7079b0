"""Findings of ``weighbridge doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weighbridge._core.json_values import JsonValue


class CheckStatus(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    """It works, but not as well as it could, or not for much longer."""
    FAIL = "fail"
    """Something that should work does not."""


@dataclass(frozen=True, slots=True)
class Check(JsonValue):
    """Result of one check.

    Attributes:
        name: what was checked.
        status: the outcome.
        what: the finding, with figures.
        fix: how to fix it; empty if nothing needs to be done.
    """

    name: str
    status: CheckStatus
    what: str
    fix: str = ""

    @staticmethod
    def ok(name: str, what: str) -> Check:
        """Return the result of a check that found nothing to fix."""
        return Check(name, CheckStatus.OK, what)

    @staticmethod
    def warn(name: str, what: str, fix: str) -> Check:
        """Return the result of a check of something that works, but not as well as it could, or not for much longer."""
        return Check(name, CheckStatus.WARN, what, fix)

    @staticmethod
    def fail(name: str, what: str, fix: str) -> Check:
        """Return the result of a check of something that should work but does not."""
        return Check(name, CheckStatus.FAIL, what, fix)

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f"; what to do: {self.fix}" if self.fix else "")
