"""Versions and refs from a model's head. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge._core.resources import REF_LIVE, Version, VersionState
from weighbridge.errors import NotFound
from weighbridge_service.catalog.holding import with_approval
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_storage.documents.entries import Approval, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History

_RETIRED = "it was taken out of history, and is kept only for its current readers"


def refs_of(head: Head, snapshots: Mapping[int, VersionSnapshot]) -> dict[str, int]:
    """Version number by ref, with ``live`` from the head and the snapshots of this process."""
    refs = head.ref_numbers
    if number := live(head, snapshots):
        refs[REF_LIVE] = number
    return refs


def live(head: Head | None, snapshots: Mapping[int, VersionSnapshot]) -> int:
    """Number of the version that ``live`` names: the newest that is visible and not held, in history or in the
    snapshots of this process.

    0 if there is none. Without a head, only the snapshots count, and no approvals.
    """
    released = (
        number
        for number, known in snapshots.items()
        if known.version.state.visible and not with_approval(known.version, approval_in(head, number)).held
    )
    return max((*released, 0 if head is None else head.latest))


def in_memory(head: Head | None, snapshots: Mapping[int, VersionSnapshot], version: str) -> Version | None:
    """A visible version that this process has in memory, by its number or as ``live``; None if there is none.

    Also None if ``live`` names a newer version in ``head``, which was read last: ``live`` never goes back.
    """
    readable = {number: known for number, known in snapshots.items() if known.readable}
    number = live(head, readable) if version == REF_LIVE else number_in(version)
    known = None if number is None else readable.get(number)
    return None if known is None else with_approval(known.version, approval_in(head, known.version.number))


def page_of(
    name: ModelName,
    history: History,
    snapshots: Mapping[int, VersionSnapshot],
    before: int,
    limit: int,
    *,
    include_invisible: bool,
) -> list[Version]:
    """Up to ``limit`` versions with numbers below ``before``, newest first.

    Args:
        name: the model.
        history: its history, read after ``snapshots`` were taken, so that it contains versions that have become durable
            since.
        snapshots: snapshots of this process, by version number.
        before: a version number; 0 begins with the newest.
        limit: maximum number of versions.
        include_invisible: whether to also list versions that are being received or have failed.
    """
    head = history.head
    found = {entry.number: version_of_entry(name, head, entry) for entry in history.newest(limit, before or None)}
    if include_invisible:
        for number in (*head.open, *head.failed):
            if (elsewhere := invisible_version(name, head, number)) is not None:
                found[number] = elsewhere
    for number, snapshot in snapshots.items():
        version = snapshot.described if include_invisible else snapshot.version
        if number in found and found[number].state.stored:
            continue  # all replicas show the same version from history
        if version.state is VersionState.DURABLE:
            continue  # deleted since
        if version.state.visible or include_invisible:
            found[number] = with_approval(version, approval_in(head, number))
    numbers = sorted((n for n in found if not before or n < before), reverse=True)
    return [found[number] for number in numbers[:limit]]


def approval_in(head: Head | None, number: int) -> Approval | None:
    """Approval of a version, open or in history, from a head; None if there is none, or no head."""
    entry = None if head is None else head.open.get(number) or head.recent.get(number)
    return None if entry is None else entry.approval


def approved_since(head: Head | None, number: int) -> tuple[str, ...]:
    """Approved reasons for holding a version in history; empty if there is no head."""
    entry = None if head is None else head.recent.get(number)
    return () if entry is None or entry.approval is None else entry.approval.reasons


def deleted(name: ModelName, number: int) -> NotFound:
    """Error of a version that was deleted."""
    return NotFound(f"{name}@{number} was deleted", fix="use a different version; a tag keeps one permanently")


def number_in(version: str) -> int | None:
    """Version number that a text gives; None if the text can only be a ref."""
    return int(version) if version.isascii() and version.isdigit() and len(version) <= 12 else None


def invisible_version(name: ModelName, head: Head, number: int) -> Version | None:
    """A version that is being received, by any replica of the service, or that was given up; None if there is none."""
    there = head.open.get(number)
    if there is not None:
        version = Version(
            model=str(name),
            number=number,
            state=VersionState.RECEIVING if there.claim else VersionState.OPEN,
            step=there.step,
            run=there.run,
            ranks=there.ranks,
            tensor_bytes=_tensor_bytes(head),
            create_time_ms=there.created_ms,
            held=there.held,
            metadata=there.metadata,
            traceparent=there.traceparent,
        )
        return with_approval(version, there.approval)
    failed = head.failed.get(number)
    if failed is None:
        return None
    return Version(
        model=str(name),
        number=number,
        state=VersionState.ABORTED if failed.aborted else VersionState.FAILED,
        step=failed.step,
        run=failed.run,
        ranks=failed.ranks,
        tensor_bytes=_tensor_bytes(head),
        create_time_ms=failed.created_ms,
        error=failed.reason,
    )


def version_of_entry(name: ModelName, head: Head, entry: VersionEntry) -> Version:
    """A version that is part of history, or was. All replicas show the same, whether or not they have received it."""
    version = Version(
        model=str(name),
        number=entry.number,
        state=VersionState.RETIRED if entry.retired else VersionState.DURABLE,
        step=entry.step,
        run=entry.run,
        ranks=entry.ranks,
        sealed_ranks=entry.ranks,
        tensor_bytes=entry.tensor_bytes or _tensor_bytes(head),
        received_bytes=entry.tensor_bytes or _tensor_bytes(head),
        nonfinite_elements=entry.nonfinite_elements,
        create_time_ms=entry.created_ms,
        ready_time_ms=entry.ready_ms,
        verified_time_ms=entry.verified_ms,
        durable_time_ms=entry.durable_ms,
        error=_RETIRED if entry.retired else "",
        held=entry.held,
        metadata=entry.metadata,
        traceparent=entry.traceparent,
    )
    return with_approval(version, entry.approval)


def _tensor_bytes(head: Head) -> int:
    """Bytes of all tensors of a version, as registered; 0 for a training state."""
    found = head.registration.get("tensor_bytes")
    return found if isinstance(found, int) else 0
