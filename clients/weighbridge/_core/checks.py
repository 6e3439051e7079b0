"""Findings of ``weighbridge doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weighbridge._core.json_values import JsonValue


class CheckStatus(StrEnum):
    """How something stands."""

    OK = "ok"
    WARN = "warn"
    """It works, and not as well as it could, or not much longer."""
    FAIL = "fail"
    """Something that should work does not."""


@dataclass(frozen=True, slots=True)
class Check(JsonValue):
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        status: how it stands.
        what: what was found, with the figures.
        fix: what to do about it; empty if nothing needs to be done.
    """

    name: str
    status: CheckStatus
    what: str
    fix: str = ""

    @staticmethod
    def ok(name: str, what: str) -> Check:
        """Something that is well."""
        return Check(name, CheckStatus.OK, what)

    @staticmethod
    def warn(name: str, what: str, fix: str) -> Check:
        """Something that works, and not as well as it could, or not much longer."""
        return Check(name, CheckStatus.WARN, what, fix)

    @staticmethod
    def fail(name: str, what: str, fix: str) -> Check:
        """Something that should work and does not."""
        return Check(name, CheckStatus.FAIL, what, fix)

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f"; what to do: {self.fix}" if self.fix else "")
