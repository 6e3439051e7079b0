"""Versions and refs as a model's head has them. Everything here is pure."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge._core.resources import REF_LATEST, REF_LIVE, Version, VersionState
from weighbridge.errors import NotFound
from weighbridge_service.catalog.holding import approved, with_approval
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head

_RETIRED = "it was taken out of history, and is there only for those who are reading it"


def refs_of(head: Head, snapshots: Mapping[int, VersionSnapshot]) -> dict[str, int]:
    """Version number by ref, with ``live`` as the snapshots of this process have it."""
    refs = head.ref_numbers
    live = max((*released(head, snapshots), refs.get(REF_LATEST, 0)))
    if live:
        refs[REF_LIVE] = live
    return refs


def released(head: Head | None, snapshots: Mapping[int, VersionSnapshot]) -> list[int]:
    """The versions that ``live`` may name, of those of which this process knows more than the store. Without a head, nothing is approved."""
    return [
        number
        for number, known in snapshots.items()
        if known.version.state.visible and not with_approval(known.version, opened(head, number)).held
    ]


def approved_since(head: Head | None, number: int) -> tuple[str, ...]:
    """The reasons of a version in history for which it is held no more; none if there is no head."""
    entry = None if head is None else head.recent.get(number)
    return () if entry is None or entry.approval is None else entry.approval.reasons


def opened(head: Head | None, number: int) -> OpenEntry | None:
    """What a head says of an open version; None if it is none, or there is no head."""
    return None if head is None else head.open.get(number)


def deleted(name: ModelName, number: int) -> NotFound:
    """The error of a version that is gone."""
    return NotFound(f"{name}@{number} was deleted", fix="take another version; a tag keeps one for good")


def number_in(version: str) -> int | None:
    """The number of a version that is named by it; None if that may only be a ref."""
    return int(version) if version.isascii() and version.isdigit() and len(version) <= 12 else None


def invisible_version(name: ModelName, head: Head, number: int) -> Version | None:
    """A version that is being received, perhaps by other replicas of the service, or that was given up."""
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
        )
        return with_approval(version, there)
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
    """A version that is part of history, or was: as every replica shows it, whoever has received it."""
    version = Version(
        model=str(name),
        number=entry.number,
        state=VersionState.RETIRED if entry.retired else VersionState.DURABLE,
        step=entry.step,
        run=entry.run,
        ranks=entry.ranks,
        sealed_ranks=entry.ranks,
        tensor_bytes=_tensor_bytes(head),
        received_bytes=_tensor_bytes(head),
        nonfinite_elements=entry.nonfinite_elements,
        create_time_ms=entry.created_ms,
        ready_time_ms=entry.ready_ms,
        verified_time_ms=entry.verified_ms,
        durable_time_ms=entry.durable_ms,
        error=_RETIRED if entry.retired else "",
        held=entry.held,
        metadata=entry.metadata,
    )
    return version if entry.approval is None else approved(version, entry.approval)


def _tensor_bytes(head: Head) -> int:
    """Bytes of all tensors of a version: the same for all versions of a model."""
    found = head.registration.get("tensor_bytes")
    return found if isinstance(found, int) else 0
