"""Outcome of a conditional write whose response is missing, or says that the condition does not hold. Pure.

A write can be carried out although its response is lost, and the client then sends it again: the second response says what the first attempt
has changed, a conflict with ourselves. So what is written carries an id of its write, and wherever a response leaves doubt, what is
there is read before anything is decided. `s3.uploads` decides so about objects, which have the id of their last write, and `head.head_store` about
heads, which have those of the last few.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weighbridge.errors import Conflict, DeadlineExceeded
from weighbridge_storage.stores.objects import PutMode

Outcome: TypeAlias = Literal["written", "conflict", "nothing", "unknown"]


def outcome(*, landed: bool, doubtful: bool, moved: bool, forgotten: bool) -> Outcome:
    """Outcome of a write that ended in an error, from what was read after it.

    Args:
        landed: whether the write's id stands in what is there.
        doubtful: whether an attempt may have been carried out, or may still be.
        moved: whether its condition does not hold any more, so that nothing can be carried out now.
        forgotten: whether the id may be missing although the write was carried out, as others have written since.

    Returns:
        ``written``; ``conflict`` (nothing was written, and the condition does not hold); ``nothing`` (it was not written, and may be tried again); or
        ``unknown``.
    """
    if landed:
        return "written"
    if doubtful and (forgotten or not moved):
        return "unknown"
    return "conflict" if moved else "nothing"


def refused(what: str, mode: PutMode, *, there: bool) -> Conflict:
    """The error of a condition that does not hold.

    Args:
        what: what was being done, e.g. ``writing models/acme/smol/head.json``.
        mode: the condition.
        there: whether there is an object.
    """
    if mode == "create":
        return Conflict(f"{what} failed: it exists already", fix="read it, or choose another key")
    why = "another writer changed it" if there else "it is no longer there"
    return Conflict(f"{what} failed: {why}", fix="read it again and repeat the change")


def unknown(what: str, why: str) -> DeadlineExceeded:
    """The error of a write whose outcome cannot be found out. Arguments as those of `refused`; ``why`` says why not."""
    return DeadlineExceeded(
        f"{what}: whether it was done could not be found out: {why}", fix="read it, then decide"
    )
