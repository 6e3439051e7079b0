"""Probe of a store: tests whether its conditional writes are atomic, or whether it accepts conditions without honouring
them.

Some servers respond to every conditional write as if its condition held. Others check the condition first and write
later. With such a store, two replicas of the service would each lose versions that the other has published.
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from weighbridge.errors import Conflict, FailedPrecondition, NotFound, WeighbridgeError
from weighbridge_storage.stores.objects import IfMatch, ObjectStore, PutMode

_WRITERS = 8


def probe(store: ObjectStore) -> None:
    """Test conditional writes with single and with racing writers, on objects below ``probe/``.

    Removes these objects again.

    Args:
        store: any store; several processes can probe a shared one at once.

    Raises:
        FailedPrecondition: the store does not honour conditions.
        WeighbridgeError: as `ObjectStore.put`; the store cannot be used.
    """
    single, raced = (f"probe/{uuid.uuid4().hex}" for _ in range(2))
    try:
        _one_by_one(store, single)
        etag = _race(store, raced, "create")
        _race(store, raced, IfMatch(etag))
    finally:
        for key in (single, raced):
            with suppress(WeighbridgeError):
                store.delete(key)


def _one_by_one(store: ObjectStore, key: str) -> None:
    _refuse(store, key, IfMatch('"0123456789abcdef"'), "if the object is unchanged", "none existed")
    first = store.put(key, b"first", mode="create")
    _refuse(store, key, "create", "if no object exists", "one existed")
    second = store.put(key, b"second", mode=IfMatch(first))
    _refuse(store, key, IfMatch(first), "if the object is unchanged", "it had changed")
    found = store.get(key)
    if found != (b"second", second):
        raise _unfit(f"an object read {found[0]!r} with etag {found[1]} after b'second' was written as {second}")


def _refuse(store: ObjectStore, key: str, mode: PutMode, condition: str, fact: str) -> None:
    with suppress(Conflict):
        store.put(key, b"bad", mode=mode)
        raise _unfit(f"a write with the condition {condition!r} succeeded although {fact}")


def _race(store: ObjectStore, key: str, mode: PutMode) -> str:
    """Let writers race. Returns the etag that the winner got."""
    together = threading.Barrier(_WRITERS)

    def write(number: int) -> tuple[bytes, str] | None:
        # each writes different content: equal contents may have equal etags, and the condition would then continue to
        # hold
        content = f"{mode} {number}".encode()
        together.wait()
        try:
            return content, store.put(key, content, mode=mode)
        except Conflict:
            return None

    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="probe") as writers:
        won = [result for result in writers.map(write, range(_WRITERS)) if result is not None]
    if len(won) != 1:
        raise _unfit(f"of {_WRITERS} concurrent writers of one object, {len(won)} succeeded instead of one")
    try:
        found = store.get(key)
    except NotFound as error:
        raise _unfit("an object did not exist after it was written") from error
    if found != won[0]:
        raise _unfit(f"an object read {found[0]!r} after {won[0][0]!r} had won the race for it")
    return won[0][1]


def _unfit(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the store does not honor conditional writes: {why}",
        fix="use a store that supports If-None-Match and If-Match, e.g. AWS S3, SeaweedFS, MinIO, or a local folder",
    )
