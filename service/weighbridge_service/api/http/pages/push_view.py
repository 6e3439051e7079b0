"""View of pushes that are under way: how far each and its ranks are, what it waits for, and when it is given up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.reports.rank_progress import RankProgress, RankStage
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import percent
from weighbridge._core.text.sizes import readable_part
from weighbridge._core.text.waits import ranks_text
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.timeline_view import VersionPage
from weighbridge_service.push.machine.rank_progress import PushProgress

SHOWN = 1024
"""Ranks of which each has a cell."""
_QUIET_MS = 3000
"""After which it is said that nothing is heard of any rank, and when the push is given up."""


@dataclass(frozen=True, slots=True)
class LivePush:
    """A version that is being received.

    Attributes:
        version: which one.
        percent: of its bytes that have come.
        percent_text: the same in words, as long as that is known.
        bytes_text: how many of how many.
        rate: since it was opened.
        ranks: its first ranks, each of which has a cell; none where their replica knows more.
        ranks_text: how many have sealed, and copy to shared memory.
        missing: the ranks that have not declared, in words; empty if all have.
        heard_ms, given_up_ms: when a rank was last heard of, and when the push is given up unless one is before; 0 if one was just now, or that
            is not known.
    """

    version: Version
    percent: int
    percent_text: str
    bytes_text: str
    rate: str
    ranks: tuple[RankProgress, ...]
    ranks_text: str
    missing: str
    heard_ms: int
    given_up_ms: int


@dataclass(frozen=True, slots=True)
class Pushes:
    """What is being received."""

    model: str
    pushes: tuple[LivePush, ...]


def pushes_view(model: str, page: VersionPage, now_ms: int) -> Pushes:
    """What is being received of a model.

    Args:
        model: which one.
        page: of its versions.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    return Pushes(
        model,
        tuple(
            live_push(each, page.progress_of(each), now_ms) for each in page.versions if each.state.receiving
        ),
    )


def live_push(version: Version, progress: PushProgress, now_ms: int) -> LivePush:
    """The view of a version that is being received.

    Args:
        version: which one.
        progress: of its push, as far as it is known here.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    ranks = progress.ranks
    received = max(version.received_bytes, sum(each.received_bytes for each in ranks))
    total = version.tensor_bytes or sum(each.total_bytes for each in ranks)
    sealed = sum(each.stage is RankStage.SEALED for each in ranks) if ranks else version.sealed_ranks
    copying = sum(each.stage is RankStage.COPYING for each in ranks)
    done = percent(received, total)
    quiet = now_ms - progress.heard_ms >= _QUIET_MS and not copying
    return LivePush(
        version=version,
        percent=done,
        percent_text="copying" if copying and not received else f"{done} %",
        bytes_text=readable_part(received, total),
        # by whole seconds: a push that stands still is no news four times a second
        rate=words.rate(received, max(1, (now_ms - version.create_time_ms) // 1000)),
        ranks=ranks[:SHOWN],
        ranks_text=f"{sealed} of {version.ranks} sealed"
        + (f", {copying} copying to shared memory" if copying else ""),
        missing=missing_text(ranks),
        heard_ms=progress.heard_ms if quiet else 0,
        given_up_ms=progress.given_up_ms if quiet else 0,
    )


def missing_text(ranks: Sequence[RankProgress]) -> str:
    """The ranks of which nothing was heard, in words; empty if there is none."""
    absent = [each.rank for each in ranks if each.stage is RankStage.MISSING]
    return ranks_text(absent) if absent else ""
