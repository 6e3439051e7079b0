"""Opening of a version: the outcome of a request, given the model's head. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.resources import Version
from weighbridge.errors import AlreadyExists
from weighbridge_service.plan.declarations import Home, alone_at, is_alone_elsewhere
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.open_versions import (
    AskedVersion,
    give_up_abandoned,
    give_up_ended,
    give_up_version,
    open_version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningRequest(AskedVersion):
    """Request to open a version, with the knowledge of the process that serves it.

    Attributes:
        home: the process that serves the request.
        given_up: versions that were given up at that process, by number, whether or not the head records it.
        receiving: numbers of the versions that the process is receiving.
        present: numbers of the versions that the process has and has not given up: these, and complete ones.
        reached: addresses of the replicas to which it can send ranks.
    """

    home: Home
    given_up: Mapping[int, Version]
    receiving: Collection[int] = ()
    present: Collection[int] = ()
    reached: Collection[str] = ()

    def open(self, head: Head, now_ms: int) -> tuple[Head, tuple[OpenEntry, Head]]:
        """Open the version, or find it open. Returns the new head, and the version's entry with that head.

        Args:
            head: head of the model.
            now_ms: the time, in milliseconds since 1970 UTC.

        Raises:
            ReceivedElsewhere: another replica receives the version alone, and ranks cannot be sent there.
        """
        head = give_up_abandoned(head, now_ms, self.present)
        for number in self.given_up.keys() & head.open.keys():
            if head.open[number].request_id == self.request_id:
                head = give_up_ended(head, self.given_up[number], now_ms)
        changed, entry = open_version(head, self, now_ms)
        alone = alone_at(entry)
        if alone == self.home.address and entry.number not in self.receiving:
            # this process does not know the version: an earlier process at the same address died with the received
            # bytes
            head = give_up_version(head, entry.number, "the replica that received it was restarted", now_ms)
            changed, entry = open_version(head, self, now_ms)
        if alone not in self.reached:
            check_not_received_alone(entry, self.home)
        return changed, (entry, changed)


class ReceivedElsewhere(AlreadyExists):
    """Another replica receives an open version alone.

    Attributes:
        address: address of that replica.
    """

    def __init__(self, message: str, *, fix: str = "", details: Sequence[str] = (), address: str = "") -> None:
        super().__init__(message, fix=fix, details=details)
        self.address = address

    @staticmethod
    def of(entry: OpenEntry) -> ReceivedElsewhere:
        """The error for a version."""
        address = alone_at(entry)
        return ReceivedElsewhere(
            f"version {entry.number} is being received by the replica {address}",
            fix=f"push to that replica; or abort version {entry.number}, or wait until it times out, and push again",
            address=address,
        )


def check_not_received_alone(entry: OpenEntry, home: Home) -> None:
    """Raise ReceivedElsewhere if another replica receives an open version alone."""
    if is_alone_elsewhere(entry, home):
        raise ReceivedElsewhere.of(entry)
