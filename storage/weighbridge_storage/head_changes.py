"""What may change in a model's head? Everything here is pure: a function takes a head and gives the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    VersionFailed,
)
from weighbridge.resources import REF_LATEST, Retention
from weighbridge_storage.head import (
    MAX_TEXT,
    REMEMBERED_FAILURES,
    REMEMBERED_WRITES,
    FailedEntry,
    Head,
    OpenEntry,
    Tombstone,
    VersionEntry,
)
from weighbridge_storage.names import MAX_VERSION, check_ref_name, shown

MAX_OPEN = 1024
"""Most versions of one model that are received at one time."""


def open_version(
    head: Head, *, request_id: str, step: int, run: str, ranks: int, now_ms: int, lease_ms: int
) -> tuple[Head, OpenEntry]:
    """Take the next number for a version, or find the one that this request has opened before and that is still open.

    A number is given once, whatever becomes of the version.

    Args:
        head: the model's.
        request_id: which request this is; not empty.
        step, run, ranks: what the version will say of itself.
        now_ms: milliseconds since 1970 UTC.
        lease_ms: how long the version stays open unless it is renewed.

    Raises:
        InvalidArgument: the request has opened a version of another step or run, or with another number of ranks.
        ResourceExhausted: all numbers up to `MAX_VERSION` have been given, or too many versions are open.
    """
    for there in head.open.values():
        if there.request_id == request_id:
            check_same_request(there.number, (there.step, there.run, there.ranks), (step, run, ranks))
            return head, there
    if head.next_version > MAX_VERSION:
        raise ResourceExhausted(f"all version numbers up to {MAX_VERSION} have been given")
    if len(head.open) >= MAX_OPEN:
        raise ResourceExhausted(
            f"{len(head.open)} versions of the model are being received",
            fix="wait until one is done, or abort one",
        )
    entry = OpenEntry(
        number=head.next_version,
        request_id=request_id,
        step=step,
        run=run,
        ranks=ranks,
        created_ms=now_ms,
        until_ms=now_ms + lease_ms,
        files_id=head.files_id,
        parent=head.refs.get(REF_LATEST, 0),
    )
    changed = replace(head, next_version=head.next_version + 1, open={**head.open, entry.number: entry})
    return changed, entry


def check_same_request(number: int, there: tuple[int, str, int], asked: tuple[int, str, int]) -> None:
    """Raise InvalidArgument if what was said at a version's opening, step, run and ranks, is not what is asked for now."""
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


def claim_version(head: Head, number: int, claim: str) -> Head:
    """Say who writes an open version's folder. Claiming it again with the same claim changes nothing.

    Raises:
        VersionFailed: it is no longer open.
        AlreadyExists: somebody else has claimed it.
    """
    there = still_open(head, number)
    if there.claim == claim:
        return head
    if there.claim:
        raise AlreadyExists(f"version {number} is being written by others", fix="push the step again")
    return replace(head, open={**head.open, number: replace(there, claim=claim)})


def renew_version(head: Head, number: int, until_ms: int) -> Head:
    """Move on the time at which an open version may be taken for abandoned.

    Raises:
        VersionFailed: it is no longer open.
    """
    there = still_open(head, number)
    return replace(head, open={**head.open, number: replace(there, until_ms=max(there.until_ms, until_ms))})


def give_up_version(head: Head, number: int, reason: str, now_ms: int) -> Head:
    """Close an open version for good: nobody can publish it any more, and its objects may be deleted.

    Nothing changes if it is not open.
    """
    if number not in head.open:
        return head
    printable = "".join(c if c.isprintable() else " " for c in reason)[:MAX_TEXT]
    failed = {**head.failed, number: FailedEntry(number, printable, now_ms)}
    return replace(
        head,
        open={other: entry for other, entry in head.open.items() if other != number},
        failed=dict(sorted(failed.items(), key=lambda item: item[1].failed_ms)[-REMEMBERED_FAILURES:]),
    )


def give_up_abandoned(head: Head, now_ms: int) -> Head:
    """Close the open versions of which nothing was heard for longer than they were to stay open."""
    for number, entry in head.open.items():
        if entry.until_ms < now_ms:
            head = give_up_version(head, number, "it was abandoned: nothing more was heard of it", now_ms)
    return head


def still_open(head: Head, number: int) -> OpenEntry:
    """An open version.

    Raises:
        VersionFailed: it is not open; says why, where that is known.
    """
    there = head.open.get(number)
    if there is not None:
        return there
    failed = head.failed.get(number)
    raise VersionFailed(
        f"version {number} was given up: {failed.reason}" if failed else f"version {number} is not open",
        fix="push the step again",
    )


def check_not_given_up(head: Head, number: int) -> None:
    """Raise VersionFailed if a version can neither be read nor become readable any more."""
    if not head.readable(number):
        still_open(head, number)


def publish(head: Head, entry: VersionEntry) -> Head:
    """Make a version part of history. ``latest`` moves to it unless it names a higher one.

    Publishing what is already there with the same write id changes nothing.

    Raises:
        VersionFailed: the version is not open: it was given up, was deleted, or never was.
        AlreadyExists: another claim than ``entry.write_id`` holds, or has published it.
    """
    there = head.versions.get(entry.number)
    if there is not None:
        if there.write_id == entry.write_id:
            return head
        raise AlreadyExists(f"version {entry.number} was published by another writer")
    if still_open(head, entry.number).claim != entry.write_id:
        raise AlreadyExists(f"version {entry.number} is claimed by another writer")
    return replace(
        head,
        versions={**head.versions, entry.number: entry},
        open={number: other for number, other in head.open.items() if number != entry.number},
        refs={**head.refs, REF_LATEST: max(entry.number, head.refs.get(REF_LATEST, 0))},
    )


def set_ref(head: Head, name: str, number: int) -> Head:
    """Let a ref name a version, whatever it named before.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: there is no such version.
    """
    check_ref_name(name)
    _check_there(head, number)
    return replace(head, refs={**head.refs, name: number})


def delete_ref(head: Head, name: str) -> Head:
    """Remove a ref; the version it named stays.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: there is no such ref.
    """
    check_ref_name(name)
    if name not in head.refs:
        raise NotFound(f"there is no ref {name}")
    return replace(head, refs={other: number for other, number in head.refs.items() if other != name})


def delete_versions(head: Head, numbers: Collection[int], deleted_ms: int) -> Head:
    """Take versions out of history and leave tombstones; their objects may be deleted once nobody reads them any more.

    Deleting what is already deleted changes nothing.

    Raises:
        NotFound: one of them is not there.
        FailedPrecondition: one is still being received, or a ref names it. ``latest`` always names one, so the newest version
            cannot be deleted.
    """
    for number in head.open.keys() & set(numbers):
        raise FailedPrecondition(
            f"version {number} is still being received", fix="abort it, or wait until it is durable"
        )
    gone = {
        number: Tombstone(_check_there(head, number), deleted_ms)
        for number in numbers
        if number not in head.tombstones
    }
    for number in gone.keys() & set(head.refs.values()):
        names = sorted(name for name, named in head.refs.items() if named == number)
        raise FailedPrecondition(
            f"version {number} is what {', '.join(names[:5])} names",
            fix="publish a newer version first" if REF_LATEST in names else "move or delete the ref first",
        )
    return replace(
        head,
        versions={other: entry for other, entry in head.versions.items() if other not in gone},
        tombstones={**head.tombstones, **gone},
    )


def forget_versions(head: Head, numbers: Collection[int]) -> Head:
    """Remove tombstones, once the versions' objects are deleted. Nothing changes for those that have none."""
    return replace(head, tombstones={n: t for n, t in head.tombstones.items() if n not in numbers})


def set_retention(head: Head, retention: Retention) -> Head:
    """Say which versions are to be kept. Nothing is deleted by that alone."""
    return replace(head, retention=retention)


def register(head: Head, files_id: str, registration: Mapping[str, Any]) -> Head:
    """Replace what is registered with the model. Versions that are there keep the files they were written with."""
    return replace(head, files_id=files_id, registration=dict(registration))


def stamp(changed: Head, base: Head, write_id: str) -> Head:
    """``changed`` as the successor of ``base``, carrying the id of the write that makes it so."""
    return replace(
        changed,
        generation=base.generation + 1,
        writes=(*base.writes[-REMEMBERED_WRITES + 1 :], write_id),
    )


def _check_there(head: Head, number: int) -> VersionEntry:
    if number not in head.versions:
        raise NotFound(f"there is no version {shown(number)}")
    return head.versions[number]
