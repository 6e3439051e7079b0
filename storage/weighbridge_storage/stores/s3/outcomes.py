"""Outcome of a write whose response is missing, or says that a condition does not hold.

A response that is lost makes botocore send the request again, and the second response says what the first attempt has
changed: a conflict with ourselves, or an upload that is no longer there. So every write stamps its object with an id of
its own, and wherever a response leaves doubt, the object is looked at before anything is decided.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weighbridge.errors import Conflict, DeadlineExceeded, WeighbridgeError
from weighbridge_storage.stores.objects import PutMode
from weighbridge_storage.stores.s3.client import ObjectState, S3Client
from weighbridge_storage.stores.s3.errors import (
    S3_ERRORS,
    is_missing,
    is_unanswered,
    s3_error,
    status_of,
    was_retried,
)

Outcome: TypeAlias = Literal["written", "conflict", "busy", "failed", "unknown"]


def decide(error: Exception, found: ObjectState | None, write_id: str, mode: PutMode) -> Outcome:
    """What came of a write that ended in an error.

    Args:
        error: what botocore raised.
        found: the object as it was found after that; None if there was none.
        write_id: of the write.
        mode: its condition.

    Returns:
        ``written``; ``conflict`` (the condition did not hold); ``busy`` (another write was under way, and nothing has
        come of it: worth another attempt); ``failed`` (the error says why); or ``unknown``. Nothing was or will be written
        if it is ``conflict``, ``busy`` or ``failed``.
    """
    if found is not None and found.write_id == write_id:
        return "written"
    if is_unanswered(error) or was_retried(error):
        # Ours may still be under way, or may have landed and been replaced by now.
        return "unknown"
    if not _is_conflict(error, mode):
        return "failed"
    return "busy" if status_of(error) == 409 and _holds(mode, found) else "conflict"


def settle(
    client: S3Client, name: str, write_id: str, mode: PutMode, error: Exception, what: str
) -> str | None:
    """The etag of what a write that ended in an error has written after all; None if it is worth another attempt.

    Args:
        client: to look at the object with.
        name: of the object.
        write_id: of the write.
        mode: its condition.
        error: what botocore raised.
        what: what was being done, for messages.

    Raises:
        Conflict: the condition did not hold; nothing was written.
        DeadlineExceeded: it cannot be found out.
        WeighbridgeError: as `s3_error`; nothing was written.
    """
    try:
        found = _look(client, name)
    except S3_ERRORS as second:
        if not is_unanswered(error) and not was_retried(error) and not _is_conflict(error, mode):
            raise s3_error(error, what) from error
        raise _unknown(what, s3_error(second, "reading back")) from second
    outcome = decide(error, found, write_id, mode)
    if outcome == "written" and found is not None:
        return found.etag
    if outcome == "busy":
        return None
    if outcome == "unknown":
        raise _unknown(what, s3_error(error, "the request")) from error
    if outcome == "conflict":
        raise conflict(what, mode, found) from error
    raise s3_error(error, what) from error


def conflict(what: str, mode: PutMode, found: ObjectState | None) -> Conflict:
    """The error that says why a condition did not hold."""
    if mode == "create":
        return Conflict(f"{what} failed: it exists already", fix="read it, or choose another key")
    why = "it is no longer there" if found is None else "another writer changed it"
    return Conflict(f"{what} failed: {why}", fix="read it again and repeat the change")


def _look(client: S3Client, name: str) -> ObjectState | None:
    try:
        return client.head(name)
    except S3_ERRORS as error:
        if is_missing(error):
            return None
        raise


def _is_conflict(error: Exception, mode: PutMode) -> bool:
    # AWS answers 404 to If-Match where there is no object, others 412
    return status_of(error) in (409, 412) or (is_missing(error) and mode not in ("create", "overwrite"))


def _holds(mode: PutMode, found: ObjectState | None) -> bool:
    if mode == "overwrite":
        return True
    if mode == "create":
        return found is None
    return found is not None and found.etag == mode.etag


def _unknown(what: str, why: WeighbridgeError) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{what}: whether it was done could not be found out: {why.message}", fix="read it, then decide"
    )
