"""View of pushes in progress: the progress of each push and its ranks, what the push waits for, and when it is aborted.
Pure.
"""

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
"""Maximum number of ranks that are shown as cells."""
_QUIET_MS = 3000
"""If no rank sends a request for this many milliseconds, the page reports that, and when the push will be aborted."""


@dataclass(frozen=True, slots=True)
class LivePush:
    """A version that the service is receiving.

    Attributes:
        version: the version.
        percent: percentage of its bytes that have been received.
        percent_text: the percentage as text, or ``copying`` while ranks copy and no bytes are counted.
        bytes_text: received bytes and total bytes, as text.
        rate: average rate since the version was opened, as text.
        ranks: the first `SHOWN` ranks, as cells; empty if only another replica knows them.
        ranks_text: number of ranks that have sealed, and of ranks that copy to shared memory, as text.
        missing: the ranks that have not declared a layout, as text; empty if all have.
        heard_ms, given_up_ms: time of the last request from a rank, and time at which the push is aborted unless a rank
            sends another one, in milliseconds since 1970 UTC; 0 if there was a request just now, or the time is
            unknown.
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
class PushesView:
    """Pushes of a model in progress."""

    model: str
    pushes: tuple[LivePush, ...]


def pushes_view(model: str, page: VersionPage, now_ms: int) -> PushesView:
    """The pushes of a model in progress.

    Args:
        model: name of the model.
        page: a page of its versions.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    return PushesView(
        model,
        tuple(live_push(each, page.progress_of(each), now_ms) for each in page.versions if each.state.receiving),
    )


def live_push(version: Version, progress: PushProgress, now_ms: int) -> LivePush:
    """The view of a version that the service is receiving.

    Args:
        version: the version.
        progress: progress of its push, as far as this process knows it.
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
        # whole seconds, so that the rate of a stalled push does not change the page four times a second
        rate=words.rate(received, max(1, (now_ms - version.create_time_ms) // 1000)),
        ranks=ranks[:SHOWN],
        ranks_text=f"{sealed} of {version.ranks} sealed" + (f", {copying} copying to shared memory" if copying else ""),
        missing=missing_text(ranks),
        heard_ms=progress.heard_ms if quiet else 0,
        given_up_ms=progress.given_up_ms if quiet else 0,
    )


def missing_text(ranks: Sequence[RankProgress]) -> str:
    """The ranks that have sent no request, as text; empty if there are none."""
    absent = [each.rank for each in ranks if each.stage is RankStage.MISSING]
    return ranks_text(absent) if absent else ""
