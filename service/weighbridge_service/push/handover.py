"""Handover of a version: what a replica that leaves gives to another one besides the files, and how it reaches that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge_service.models import RegisteredModel
from weighbridge_service.push.declarations import Home
from weighbridge_storage.entries import OpenEntry


@dataclass(frozen=True, slots=True)
class HandedVersion:
    """A version that is ready and not durable, without its bytes.

    Attributes:
        model: the registration under which it was opened.
        entry: what head.json said of it when it was opened.
        claim: the agreement under which it was pushed, and is published.
        ready_ms: when it became ready, in milliseconds since 1970 UTC.
        ranks: client and layout digest of each rank.
    """

    model: RegisteredModel
    entry: OpenEntry
    claim: str
    ready_ms: int
    ranks: Sequence[tuple[str, str]]

    @property
    def key(self) -> tuple[str, int, str]:
        """Model, number and claim."""
        return str(self.model.name), self.entry.number, self.claim


class Successors(Protocol):
    """The replicas that may take versions over from this one. Thread-safe."""

    def others(self) -> Sequence[Home]:
        """Those that are known, in the order in which they are to be asked. Asks nothing of the store."""

    def hand_over(self, to: Home, version: HandedVersion, seconds: float) -> None:
        """Returns when another replica has all bytes of a version and owns it.

        Args:
            to: which replica.
            version: which version.
            seconds: how long that may take.

        Raises:
            WeighbridgeError: it refuses, cannot be reached, or takes too long.
        """
