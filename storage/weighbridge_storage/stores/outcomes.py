"""Outcome of a conditional write whose response is missing, or reports that the condition does not hold.

All functions are pure.

A write can succeed although its response is lost. If the client then retries it, the second response reports a conflict
with the change that the first attempt made. So the written data contains an id of its write, and if a response leaves
doubt, the data is read back before the outcome is decided. `s3.uploads` does this for objects, which contain the id of
their last write, and `head.head_store` for heads, which contain the ids of the last few writes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weighbridge.errors import Conflict, DeadlineExceeded
from weighbridge_storage.stores.objects import PutMode

Outcome: TypeAlias = Literal["written", "conflict", "nothing", "unknown"]


def outcome(*, landed: bool, doubtful: bool, moved: bool, forgotten: bool) -> Outcome:
    """Outcome of a write that ended in an error, according to a later read.

    Args:
        landed: whether the stored data contains the write's id.
        doubtful: whether an attempt may have been carried out, or may still be carried out.
        moved: whether its condition no longer holds, so that no attempt can be carried out now.
        forgotten: whether the id may be missing although the write was carried out, because later writes have replaced
            it.

    Returns:
        ``written``; ``conflict`` (nothing was written, and the condition does not hold); ``nothing`` (it was not
        written, and may be retried); or ``unknown``.
    """
    if landed:
        return "written"
    if doubtful and (forgotten or not moved):
        return "unknown"
    return "conflict" if moved else "nothing"


def refused(what: str, mode: PutMode, *, there: bool) -> Conflict:
    """The error to raise when a condition does not hold.

    Args:
        what: the operation, e.g. ``writing models/acme/smol/head.json``.
        mode: the condition.
        there: whether the object exists.
    """
    if mode == "create":
        return Conflict(f"{what} failed: it exists already", fix="read it, or choose another key")
    why = "another writer changed it" if there else "it is no longer there"
    return Conflict(f"{what} failed: {why}", fix="read it again and repeat the change")


def unknown(what: str, why: str) -> DeadlineExceeded:
    """The error to raise for a write whose outcome is unknown.

    Arguments are those of `refused`; ``why`` is the reason.
    """
    return DeadlineExceeded(f"{what}: its outcome is unknown: {why}", fix="read it, then decide")
