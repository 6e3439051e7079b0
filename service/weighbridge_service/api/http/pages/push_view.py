"""View of a push: how far it and each of its ranks are, what it waits for, and what it cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.resources import Version, VersionState
from weighbridge._core.text.sizes import readable_size
from weighbridge._core.text.waits import ranks_text
from weighbridge_service.api.http.pages import words
from weighbridge_service.push.machine.rank_progress import RankProgress, held_up

_SHOWN = 1024
"""Ranks of which each has a cell."""


@dataclass(frozen=True, slots=True)
class RankCell:
    """A rank in a picture of all ranks.

    Attributes:
        rank: which one.
        state: ``missing``, ``declared``, ``sending``, ``sealed`` or ``elsewhere``.
        percent: of its bytes that have come.
        text: the same in words.
    """

    rank: int
    state: str
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
    received = max(version.received_bytes, sum(each.received for each in ranks))
    total = version.tensor_bytes or sum(each.total for each in ranks)
    absent = [each.rank for each in ranks if not each.declared_ms and not each.elsewhere]
    sealed = sum(bool(each.sealed_ms) for each in ranks) if ranks else version.sealed_ranks
    return LivePush(
        number=version.number,
        step=version.step,
        run=version.run,
        state=version.state,
        opened_ms=version.create_time_ms,
        percent=words.percent(received, total) if total else 0,
        bytes_text=f"{readable_size(received)} of {readable_size(total)}"
        if total
        else readable_size(received),
        # by whole seconds: a push that stands still is no news four times a second
        rate=words.rate(received, max(1, (now_ms - version.create_time_ms) // 1000) * 1000),
        ranks=cells(ranks),
        ranks_total=version.ranks,
        ranks_text=f"{sealed} of {version.ranks} sealed",
        missing=ranks_text(absent) if absent else "",
        waits_for=version.waits_for,
    )


def cells(ranks: Sequence[RankProgress]) -> tuple[RankCell, ...]:
    """The ranks as cells of a picture."""
    return tuple(map(_cell, ranks[:_SHOWN]))


def held_up_text(ranks: Sequence[RankProgress]) -> str:
    """Who held the others up, in words; empty if nobody did notably, or nobody knows."""
    found = held_up(ranks)
    if found is None:
        return ""
    late = "to declare" if found.declaring else "with its bytes"
    return f"rank {found.rank} was {words.duration(found.behind_ms)} behind {late}"


def _cell(each: RankProgress) -> RankCell:
    done = 100 if each.sealed_ms else words.percent(each.received, each.total) if each.total else 0
    amount = f"{readable_size(each.received)} of {readable_size(each.total)}"
    if each.elsewhere:
        return RankCell(each.rank, "elsewhere", 0, "pushes to another replica")
    if each.sealed_ms:
        return RankCell(each.rank, "sealed", 100, f"sealed, {readable_size(each.total)}")
    if each.received:
        return RankCell(each.rank, "sending", done, amount)
    if each.declared_ms:
        return RankCell(each.rank, "declared", 0, "declared, nothing received")
    return RankCell(each.rank, "missing", 0, "not heard of")
