"""Transitions of a model's history, refs and rules. All functions are pure: each takes a head and returns the next one.

A function that reads versions which may not be in the head itself takes the `History` of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from weighbridge._core.resources import REF_LATEST
from weighbridge._core.text.shortening import shown
from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
)
from weighbridge_storage.documents.entries import Ref, VersionEntry
from weighbridge_storage.documents.names import check_ref_name
from weighbridge_storage.head.head import KEPT, REMEMBERED_WRITES, Deletion, Head, Mark
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import still_open
from weighbridge_storage.head.pins import adapters_text, pinned_by, sees_all

MAX_REFS = 1024
"""Maximum number of refs of one model."""


def publish(history: History, entry: VersionEntry) -> Head:
    """Make a version part of history.

    ``latest`` moves to it unless ``latest`` names a higher version or the version is held.

    The version is held for the reasons of ``entry`` and those of its opening, except for reasons that were approved
    since. Metadata and approval are those of the open version. A repeated call with the same write id changes nothing.

    Raises:
        VersionFailed: the version is not open: it failed, was deleted, or was never opened.
        AlreadyExists: the version has another claim than ``entry.write_id``, or was published under another claim.
    """
    head, number = history.head, entry.number
    there = None if number in head.open else history.durable(number)
    if there is not None:
        if there.write_id == entry.write_id:
            return head
        raise AlreadyExists(f"version {number} was published by another writer")
    opened = still_open(head, number)
    if opened.claim != entry.write_id:
        raise AlreadyExists(f"version {number} is claimed by another writer")
    entry = replace(entry, held=opened.holding(entry.held), approval=opened.approval, metadata=opened.metadata)
    without = {other: there for other, there in head.open.items() if other != number}
    return with_entry(replace(head, open=without), entry)


def with_entry(head: Head, entry: VersionEntry) -> Head:
    """A head with an added entry of its history. ``latest`` moves to the version, unless the version is held or
    ``latest`` names a higher version.
    """
    refs = head.refs if entry.held else _moved(head, REF_LATEST, max(entry.number, head.latest))
    return replace(head, recent={**head.recent, entry.number: entry}, refs=refs)


def set_ref(history: History, name: str, number: int) -> Head:
    """Point a ref at a version.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: the version does not exist.
        ResourceExhausted: the model already has `MAX_REFS` other refs.
    """
    check_ref_name(name)
    check_there(history, number)
    head = history.head
    if name not in head.refs and len(head.refs) >= MAX_REFS:
        raise ResourceExhausted(f"the model has {len(head.refs)} refs", fix="delete one that is no longer needed")
    return replace(head, refs=_moved(head, name, number))


def _moved(head: Head, name: str, number: int) -> Mapping[str, Ref]:
    there = head.refs.get(name)
    return {**head.refs, name: Ref(number) if there is None else replace(there, version=number)}


def delete_ref(head: Head, name: str) -> Head:
    """Remove a ref. The version that it named stays.

    Raises:
        InvalidArgument: the name is malformed or reserved.
        NotFound: the ref does not exist.
    """
    check_ref_name(name)
    if name not in head.refs:
        raise NotFound(f"there is no ref {name}")
    return replace(head, refs={other: ref for other, ref in head.refs.items() if other != name})


def delete_versions(
    history: History,
    numbers: Collection[int],
    retired_ms: int,
    *,
    model: object = "MODEL",
    forced: bool = False,
    sees: Callable[[str], bool] = sees_all,
) -> Head:
    """Remove versions from history. Their objects may be deleted once no reader has a lease.

    If a version is already deleted, nothing changes.

    Args:
        history: the history before.
        numbers: numbers of the versions.
        retired_ms: present time in milliseconds since 1970 UTC.
        model: the model's name, for errors.
        forced: whether to delete even versions that adapters are based on. Their pins are removed, and the adapters
            remain without a base.
        sees: returns whether the caller may know about an adapter of this name. Errors state only the number of the
            others.

    Raises:
        NotFound: a version does not exist.
        FailedPrecondition: a version is the base of an adapter, and ``forced`` is not set; a version is still being
            received; or a ref names a version, or a pending request would make it do so. ``latest`` always names a
            version, so the newest version that is not held cannot be deleted.
    """
    head = history.head
    for number in head.open.keys() & set(numbers):
        raise FailedPrecondition(
            f"version {number} is still being received", fix="abort it, or wait until it is durable"
        )
    found = {number: history.find(number) or check_there(history, number) for number in numbers}
    gone = {
        number: replace(entry, retired_ms=max(retired_ms, 1)) for number, entry in found.items() if not entry.retired
    }
    refs = head.ref_numbers
    for number in gone.keys() & set(refs.values()):
        names = sorted(name for name, other in refs.items() if other == number)
        raise FailedPrecondition(
            f"version {number} is the target of {', '.join(names[:5])}",
            fix="publish a newer version first"
            if REF_LATEST in names
            else f"move the ref first, or delete it: weighbridge tag {model} {names[0]} --delete",
        )
    for ref, number in head.requested(retired_ms).items():
        if number in gone:
            raise FailedPrecondition(
                f"a pending request asks to move {ref} to version {number}",
                fix="approve or withdraw the request first",
            )
    for number in sorted(gone if not forced else ()):
        if adapters := pinned_by(head, number):
            raise FailedPrecondition(
                f"version {number} is the base of {adapters_text(adapters, sees)}",
                fix=(
                    "delete the adapters' versions first, and collect; or delete it anyway with "
                    "--force: they can no longer be loaded with it"
                ),
            )
    return replace(
        head,
        recent={**head.recent, **gone},
        pins=tuple(pin for pin in head.pins if pin.version not in gone),
    )


def forget_versions(history: History, numbers: Collection[int]) -> Head:
    """Remove the entries of retired versions after their objects were deleted.

    Versions that are not retired are ignored.
    """
    head = history.head
    gone = {number for number in numbers if (entry := history.find(number)) is not None and entry.retired}
    if not gone:
        return head
    recent = {number: entry for number, entry in head.recent.items() if number not in gone}
    without = replace(head, recent=recent)
    return replace(without, removed=head.removed | {number for number in gone if without.in_tree(number)})


def mark_history(head: Head, now_ms: int) -> Head:
    """Record the current root, so that nodes that are not below it now can be identified later."""
    return replace(head, mark=Mark(head.root, head.generation, now_ms))


def keep(head: Head, value: Any) -> Head:
    """Replace the head's value of this type: a `Retention`, which deletes nothing until a collection runs, or a `Gate`,
    for versions that are opened later."""
    return replace(head, **{KEPT[type(value)].name: value})


def delete_model(
    head: Head,
    now_ms: int,
    *,
    request_id: str = "",
    versions: int = 0,
    forced: bool = False,
    sees: Callable[[str], bool] = sees_all,
) -> Head:
    """Delete a model with all of its versions, refs and rules.

    If the name is registered again, the numbering continues.

    A collection deletes the objects; those of a version only once no reader has a lease.

    Args:
        head: the head before.
        now_ms: current time in milliseconds since 1970 UTC.
        request_id: identifier of the request that deletes the model.
        versions: number of versions in its history.
        forced: whether to delete it even if adapters are based on its versions; the adapters remain without a base.
        sees: as for `delete_versions`.

    Raises:
        FailedPrecondition: versions are being received, refs are protected, or adapters are based on its versions and
            ``forced`` is not set.
    """
    if head.protected:
        raise FailedPrecondition(
            f"refs of the model are protected: {', '.join(sorted(head.protected)[:5])}",
            fix=(
                "remove their protection first, which needs the same approvals as moving them: "
                "weighbridge gate MODEL --unprotect REF"
            ),
        )
    if head.pins and not forced:
        adapters = sorted({pin.adapter for pin in head.pins})
        raise FailedPrecondition(
            f"versions of the model are the base of {adapters_text(adapters, sees)}",
            fix=(
                "delete these adapters first, and collect the model; or delete it anyway with "
                "--force: they can no longer be loaded with it"
            ),
        )
    if head.open:
        numbers = ", ".join(map(str, sorted(head.open)[:5]))
        raise FailedPrecondition(
            f"versions of the model are being received: {numbers}{', ...' if len(head.open) > 5 else ''}",
            fix="wait until they are durable, or abort them",
        )
    return Head(
        generation=head.generation,
        next_version=head.next_version,
        writes=head.writes,
        deletion=Deletion(max(now_ms, 1), head.next_version, request_id, versions),
        extra=head.extra,
    )


def register(head: Head, files_id: str, registration: Mapping[str, Any]) -> Head:
    """Replace the registration of a model. Existing versions keep the files that they were written with."""
    return replace(head, files_id=files_id, registration=dict(registration))


def stamp(changed: Head, base: Head, write_id: str) -> Head:
    """``changed`` as the successor of ``base``, with the id of the write that will store it."""
    return replace(
        changed,
        generation=base.generation + 1,
        writes=(*base.writes[-REMEMBERED_WRITES + 1 :], write_id),
    )


def check_there(history: History, number: int) -> VersionEntry:
    """A version that is part of history. Raises NotFound."""
    entry = history.durable(number)
    if entry is None:
        raise NotFound(f"there is no version {shown(number)}")
    return entry
