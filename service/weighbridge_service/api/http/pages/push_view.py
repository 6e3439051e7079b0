"""View of a push: how far it and each of its ranks are, what it waits for, and what it cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.reports.rank_progress import RankProgress, RankStage, held_up
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.text.counts import percent
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge._core.text.waits import ranks_text
from weighbridge_service.api.http.pages import words

_SHOWN = 1024
"""Ranks of which each has a cell."""


@dataclass(frozen=True, slots=True)
class RankCell:
    """A rank in a picture of all ranks.

    Attributes:
        rank: which one.
        state: where it stands.
        percent: of its bytes that have come.
        text: the same in words.
    """

    rank: int
    state: RankStage
    percent: int
    text: str


@dataclass(frozen=True, slots=True)
class LivePush:
    """A version that is being received.

    Attributes:
        number, step, run, state: of the version.
        opened_ms: when it was opened.
        percent: of its bytes that have come.
        bytes_text: how many of how many.
        rate: since it was opened.
        ranks: cells of its ranks; none where their replica knows more.
        ranks_total: how many there are.
        ranks_text: how many have sealed.
        missing: the ranks that have not declared, in words; empty if all have.
        waits_for: what it waits for.
    """

    number: int
    step: int
    run: str
    state: VersionState
    opened_ms: int
    percent: int
    bytes_text: str
    rate: str
    ranks: tuple[RankCell, ...]
    ranks_total: int
    ranks_text: str
    missing: str
    waits_for: tuple[str, ...]


def live_push(version: Version, ranks: Sequence[RankProgress], now_ms: int) -> LivePush:
    """The view of a version that is being received.

    Args:
        version: which one.
        ranks: how far each of its ranks is, as far as it is known here.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    received = max(version.received_bytes, sum(each.received_bytes for each in ranks))
    total = version.tensor_bytes or sum(each.total_bytes for each in ranks)
    sealed = sum(each.stage is RankStage.SEALED for each in ranks) if ranks else version.sealed_ranks
    return LivePush(
        number=version.number,
        step=version.step,
        run=version.run,
        state=version.state,
        opened_ms=version.create_time_ms,
        percent=percent(received, total),
        bytes_text=f"{readable_size(received)} of {readable_size(total)}"
        if total
        else readable_size(received),
        # by whole seconds: a push that stands still is no news four times a second
        rate=words.rate(received, max(1, (now_ms - version.create_time_ms) // 1000) * 1000),
        ranks=cells(ranks),
        ranks_total=version.ranks,
        ranks_text=f"{sealed} of {version.ranks} sealed",
        missing=missing_text(ranks),
        waits_for=version.waits_for,
    )


def missing_text(ranks: Sequence[RankProgress]) -> str:
    """The ranks that nothing was heard of, in words; empty if there are none."""
    absent = [each.rank for each in ranks if each.stage is RankStage.MISSING]
    return ranks_text(absent) if absent else ""


def cells(ranks: Sequence[RankProgress]) -> tuple[RankCell, ...]:
    """The ranks as cells of a picture."""
    return tuple(map(_cell, ranks[:_SHOWN]))


def held_up_text(ranks: Sequence[RankProgress]) -> str:
    """Who held the others up, in words; empty if nobody did notably, or nobody knows."""
    found = held_up(ranks)
    if found is None:
        return ""
    late = "to declare" if found.declaring else "with its bytes"
    return f"rank {found.rank} was {readable_duration(found.behind_ms / 1000)} behind {late}"


def _cell(each: RankProgress) -> RankCell:
    done = percent(each.received_bytes, each.total_bytes)
    match each.stage:
        case RankStage.ELSEWHERE:
            shown = 0, "pushes to another replica"
        case RankStage.SEALED:
            shown = 100, f"sealed, {readable_size(each.total_bytes)}"
        case RankStage.SENDING:
            shown = done, f"{readable_size(each.received_bytes)} of {readable_size(each.total_bytes)}"
        case RankStage.DECLARED:
            shown = 0, "declared, nothing received"
        case RankStage.MISSING:
            shown = 0, "not heard of"
    return RankCell(each.rank, each.stage, *shown)
