"""Does ``live`` name the newest version that is visible and not held, wherever that is known?"""

from __future__ import annotations

import pytest

from weighbridge._core.resources import Version, VersionState
from weighbridge_service.catalog.head_versions import live
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_storage.documents.entries import Approval, OpenEntry, Ref, VersionEntry
from weighbridge_storage.head.head import Head

CANDIDATE = ("candidate",)
APPROVAL = Approval("eva", 5, reasons=CANDIDATE)


def here(number: int, state: VersionState, *held: str) -> dict[int, VersionSnapshot]:
    return {number: VersionSnapshot(Version("acme/smol", number, state, held=held))}


def history(number: int, approval: Approval | None = None) -> Head:
    entry = VersionEntry(
        number, 1, "r", 1, 8, 1, "f", "w", held=() if approval is None else CANDIDATE, approval=approval
    )
    return Head(next_version=9, recent={number: entry}, refs={"latest": Ref(number)})


def opened(number: int, approval: Approval | None) -> Head:
    entry = OpenEntry(number, "q", 1, "r", 1, 1, 2, "f", 0, held=CANDIDATE, approval=approval)
    return Head(next_version=9, open={number: entry})


@pytest.mark.parametrize(
    ("head", "snapshots", "expected"),
    [
        (Head(), {}, 0),
        (None, {}, 0),
        (None, here(3, VersionState.READY), 3),
        (None, here(3, VersionState.READY, "candidate"), 0),
        (history(2), {}, 2),
        (history(2), here(3, VersionState.READY), 3),
        (history(2), here(3, VersionState.RECEIVING), 2),
        (history(2), here(3, VersionState.FAILED), 2),
        (history(2), here(3, VersionState.VERIFIED, "candidate"), 2),
        (history(4), here(3, VersionState.READY), 4),
        (opened(3, None), here(3, VersionState.READY, "candidate"), 0),
        (opened(3, APPROVAL), here(3, VersionState.READY, "candidate"), 3),
        (opened(3, APPROVAL), here(3, VersionState.READY, "candidate", "nonfinite"), 0),
        (history(3, APPROVAL), here(3, VersionState.DURABLE, "candidate"), 3),
    ],
)
def test_live_is_the_newest_version_that_is_visible_and_not_held(
    head: Head | None, snapshots: dict[int, VersionSnapshot], expected: int
) -> None:
    assert live(head, snapshots) == expected
