"""Transitions of open versions in a model's head: opened, claimed, renewed, failed. All functions are pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from weighbridge._core.metadata import (
    OTHER_WRITER,
    BaseVersion,
    Metadata,
    by_trainer,
    checked_metadata,
    with_other_writer,
)
from weighbridge._core.resources import HELD_CANDIDATE, Version, VersionState
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import shown
from weighbridge.errors import AlreadyExists, InvalidArgument, ResourceExhausted, VersionFailed
from weighbridge_storage.documents.entries import ABORTED, FAILED, MAX_TEXT, FailedEntry, OpenEntry
from weighbridge_storage.documents.names import MAX_VERSION
from weighbridge_storage.head.head import REMEMBERED_FAILURES, Head

MAX_OPEN = 1024
"""Maximum number of versions of one model that are received concurrently."""


@dataclass(frozen=True, slots=True)
class Said:
    """Properties of a version, in addition to step and run, that a rank states when it opens the version. All ranks
    that state properties must state the same.

    Attributes:
        candidate: whether the version is held until it is approved.
        allow_nonfinite: whether it is not held for elements that are NaN or infinite.
        metadata: metadata that is stored with it.
        cast_from: dtypes, by safetensors' names, of tensors that the rank casts to the model's.
        traceparent: W3C Trace Context of its push; the context from the rank that opens the version is stored.
    """

    candidate: bool = False
    allow_nonfinite: bool = False
    metadata: Metadata = field(default_factory=dict)
    cast_from: frozenset[str] = frozenset()
    traceparent: str = ""


_NOTHING_SAID = Said()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedVersion:
    """A request to open a version.

    Attributes:
        request_id: identifier of the push, not empty; all of its ranks send the same.
        step: the trainer's step.
        run: the trainer's name for its run.
        ranks: number of ranks that will push.
        lease_ms: milliseconds for which the version stays open unless it is renewed.
        said: further properties; they are added to those of earlier ranks.
        nbytes: total size that its safetensors files will have, in bytes; 0 if unknown.
        by: identity of the caller, as the service knows it; the first rank's identity is stored.
        at_least: the lowest number that a new version gets; skipped numbers are never assigned.
        other: the version that another job has pushed since this job's last push; stored in the metadata of a new
            version.
        base: the base of a version of an adapter; stored in the metadata of a new version.
    """

    request_id: str
    step: int
    run: str
    ranks: int
    lease_ms: int
    said: Said = _NOTHING_SAID
    nbytes: int = 0
    by: str = ""
    at_least: int = 0
    other: str = ""
    base: BaseVersion | None = None


def open_version(head: Head, asked: AskedVersion, now_ms: int) -> tuple[Head, OpenEntry]:
    """Assign the next number to a new version, or return the open version that this request has opened before.

    A number is assigned only once, even if its version fails.

    Args:
        head: the model's head.
        asked: the request.
        now_ms: current time in milliseconds since 1970 UTC.

    Raises:
        InvalidArgument: the request has already opened a version with a different step, run, number of ranks or
            metadata.
        ResourceExhausted: all numbers up to `MAX_VERSION` have been assigned, or too many versions are open.
    """
    said = asked.said
    for there in head.open.values():
        if there.request_id == asked.request_id:
            check_same_request(there.number, (there.step, there.run, there.ranks), (asked.step, asked.run, asked.ranks))
            entry = _with_said(there, said)
            return (head if entry == there else replace(head, open={**head.open, entry.number: entry})), entry
    number = max(head.next_version, asked.at_least)
    if number > MAX_VERSION:
        raise ResourceExhausted(f"all version numbers up to {MAX_VERSION} are taken")
    if len(head.open) >= MAX_OPEN:
        raise ResourceExhausted(
            counted(len(head.open), "version of the model is", "versions of the model are") + " being received",
            fix="wait until one is done, or abort one",
        )
    entry = OpenEntry(
        number=number,
        request_id=asked.request_id,
        step=asked.step,
        run=asked.run,
        ranks=asked.ranks,
        created_ms=now_ms,
        until_ms=now_ms + asked.lease_ms,
        files_id=head.files_id,
        parent=head.latest,
        held=(HELD_CANDIDATE,) if said.candidate or head.gate.approval_required else (),
        allow_nonfinite=said.allow_nonfinite or head.gate.allow_nonfinite,
        metadata=with_other_writer(_with_base(said.metadata, asked.base), asked.other),
        nbytes=asked.nbytes,
        by=asked.by,
        cast_from=tuple(sorted(said.cast_from)),
        traceparent=said.traceparent,
    )
    changed = replace(head, next_version=number + 1, open={**head.open, entry.number: entry})
    return changed, entry


def check_same_request(number: int, there: tuple[int, str, int], asked: tuple[int, str, int]) -> None:
    """Raise InvalidArgument if step, run or ranks in a later request differ from those with which the version was
    opened.
    """
    if there[2] != asked[2]:
        raise InvalidArgument(
            f"version {number} was opened with {there[2]} ranks, and now with {asked[2]}",
            fix="all ranks pass the same world_size; if two trainers push this step, give each its own run",
        )
    if there[:2] != asked[:2]:
        raise InvalidArgument(
            f"version {number} of run {there[1]!r} was opened with the same request_id; this is step {asked[0]} "
            f"of {asked[1]!r}",
            fix="give each push a request_id of its own",
        )


def _with_said(there: OpenEntry, said: Said) -> OpenEntry:
    """An open version with the properties that a further rank states. Reasons that were approved stay approved."""
    check_same_metadata(there.number, there.metadata, said.metadata)
    base = BaseVersion.of(there.metadata)
    metadata = _with_base(by_trainer(there.metadata) or said.metadata, base)
    other = str(there.metadata.get(OTHER_WRITER, ""))
    return replace(
        there,
        held=tuple(sorted({*there.held, HELD_CANDIDATE})) if said.candidate else there.held,
        allow_nonfinite=there.allow_nonfinite or said.allow_nonfinite,
        metadata=with_other_writer(metadata, other),
        cast_from=tuple(sorted(said.cast_from.union(there.cast_from))),
    )


def _with_base(metadata: Metadata, base: BaseVersion | None) -> Metadata:
    """Metadata with the base of an adapter's version added.

    Raises InvalidArgument if both together exceed the limit.
    """
    return metadata if base is None else checked_metadata({**base.metadata, **metadata})


def check_same_metadata(number: int, there: Metadata, asked: Metadata) -> None:
    """Raise InvalidArgument if two ranks give different metadata. A rank may omit metadata."""
    there, asked = by_trainer(there), by_trainer(asked)
    differing = [key for key in sorted(there.keys() | asked.keys()) if there.get(key) != asked.get(key)]
    if there and asked and differing:
        raise InvalidArgument(
            f"two ranks pass different metadata for version {number}",
            details=[f"{key}: {shown(there.get(key))} and {shown(asked.get(key))}" for key in differing],
            fix="pass the same metadata on all ranks of a push, or on one rank only",
        )


def claim_version(head: Head, number: int, claim: str, holder: str = "") -> Head:
    """Record the writer of an open version's folder. A repeated call with the same claim changes nothing.

    Args:
        head: the head before.
        number: number of the version.
        claim: identifier of the agreement under which it is written.
        holder: ``host:port`` of the replica that has taken over the version under that claim; empty for the replica
            that the claim names.

    Raises:
        VersionFailed: it is no longer open.
        AlreadyExists: another writer has claimed it.
    """
    there = still_open(head, number)
    if there.claim not in ("", claim):
        raise AlreadyExists(f"version {number} is being written by another writer", fix="push the step again")
    claimed = replace(there, claim=claim, holder=holder or there.holder)
    return head if claimed == there else replace(head, open={**head.open, number: claimed})


def renew_version(head: Head, number: int, until_ms: int) -> Head:
    """Extend the time after which an open version counts as abandoned.

    Raises:
        VersionFailed: it is no longer open.
    """
    there = still_open(head, number)
    return replace(head, open={**head.open, number: replace(there, until_ms=max(there.until_ms, until_ms))})


def give_up_ended(head: Head, ended: Version, now_ms: int) -> Head:
    """Close an open version that its process has ended, with the error: the version failed or was aborted.

    See `give_up_version`.
    """
    return give_up_version(head, ended.number, ended.error, now_ms, aborted=ended.state is VersionState.ABORTED)


def give_up_version(head: Head, number: int, reason: str, now_ms: int, *, aborted: bool = False) -> Head:
    """Close an open version permanently: it can no longer be published, and its objects may be deleted.

    Nothing changes if the version is not open.

    Args:
        head: the head before.
        number: number of the version.
        reason: why it failed.
        now_ms: current time in milliseconds since 1970 UTC.
        aborted: whether a caller requested this.
    """
    there = head.open.get(number)
    if there is None:
        return head
    entry = FailedEntry(
        number,
        "".join(c if c.isprintable() else " " for c in reason)[:MAX_TEXT],
        now_ms,
        state=ABORTED if aborted else FAILED,
        step=there.step,
        run=there.run,
        ranks=there.ranks,
        created_ms=there.created_ms,
    )
    failed = {**head.failed, number: entry}
    return replace(
        head,
        open={other: entry for other, entry in head.open.items() if other != number},
        failed=dict(sorted(failed.items(), key=lambda item: item[1].failed_ms)[-REMEMBERED_FAILURES:]),
    )


def give_up_abandoned(head: Head, now_ms: int, present: Container[int] = ()) -> Head:
    """Close the open versions that were not renewed in time, except those ``present`` in the calling process: after an
    outage of the store, that process renews them.
    """
    for number, entry in head.open.items():
        if entry.until_ms < now_ms and number not in present:
            head = give_up_version(head, number, "it was abandoned: no replica renewed it in time", now_ms)
    return head


def still_open(head: Head, number: int) -> OpenEntry:
    """An open version.

    Raises:
        VersionFailed: the version is not open; the message gives the reason, if known.
    """
    there = head.open.get(number)
    if there is not None:
        return there
    failed = head.failed.get(number)
    raise VersionFailed(
        f"version {number} was given up: {failed.reason}" if failed else f"version {number} is not open",
        fix="push the step again",
    )
