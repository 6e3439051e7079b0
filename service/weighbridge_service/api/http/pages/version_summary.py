"""Summary of a version, as the pages of its model and of itself say it: what it cost, why it failed or is held, and whom the others waited for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.reports.rank_progress import RankProgress, held_up
from weighbridge._core.resources import Version, why_failed, why_held
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_part, readable_size
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.push.machine.rank_progress import PushProgress

UNITS = 1000
"""Width of the picture of a version's times."""
_LEAST = 2
"""Width that a time has at least that is part of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a bar: what it stands for, where it begins and how long it is, in `UNITS`, and the same in words."""

    kind: str
    start: int
    length: int
    text: str


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """What is said of a version.

    Attributes:
        version: the version.
        refs: that name it.
        size: bytes of its tensors.
        spans: its times as parts of a bar: being received, verified and stored, and being received in vain.
        clipped: whether it took longer than the bar stands for.
        rate: bytes a second while it was received.
        cost: of one that was given up, what had come by then, and from whom last; empty if nobody knows.
        held_up: who held whom up; empty if nobody did, or nobody knows.
        reason: why it failed, or is not durable yet.
        held: why it is held; empty if it is not.
        may_approve: whether who looks may approve it, and it is held.
    """

    version: Version
    refs: tuple[str, ...]
    size: str
    spans: tuple[Span, ...]
    clipped: bool
    rate: str
    cost: str
    held_up: str
    reason: str
    held: str
    may_approve: bool

    @property
    def times(self) -> str:
        """Its times in words."""
        return ", ".join(each.text for each in self.spans)


def version_summary(
    version: Version, refs: tuple[str, ...], progress: PushProgress, viewer: Viewer, bar_ms: int
) -> VersionSummary:
    """What is said of a version.

    Args:
        version: which one.
        refs: that name it.
        progress: of its push, as far as it is known.
        viewer: who looks.
        bar_ms: milliseconds for which a whole bar stands.
    """
    given_up = version.state.given_up
    return VersionSummary(
        version=version,
        refs=refs,
        size=readable_size(version.tensor_bytes) if version.tensor_bytes else words.NONE,
        spans=spans_of(version, progress, bar_ms),
        clipped=taken_ms(version, progress) > bar_ms,
        rate=words.rate(version.tensor_bytes, version.ready_seconds),
        cost=_cost_text(version, progress.ranks) if given_up else "",
        held_up="" if given_up else _held_up_text(progress.ranks),
        reason=why_failed(version) if given_up else version.error,
        held=why_held(version) if version.held and not given_up else "",
        may_approve=bool(version.held)
        and version.state.visible
        and viewer.may(Verb.APPROVE, version.model, str(version.number)),
    )


@dataclass(frozen=True, slots=True)
class LastPush:
    """The last push of a model that was complete.

    Attributes:
        version: that it made; None if there is none.
        time, rate: what receiving it took.
        durable_time: what it took to store it as well.
        given_up: the newest version, if it has failed or was aborted; None otherwise.
    """

    version: Version | None
    time: str
    rate: str
    durable_time: str
    given_up: Version | None

    @property
    def opened_ms(self) -> int:
        """When it began; 0 if there is none."""
        return self.version.create_time_ms if self.version else 0


def last_push(versions: Sequence[Version], *, newest: bool = True) -> LastPush:
    """The last push.

    Args:
        versions: of the model, newest first.
        newest: whether the newest one is among them.
    """
    found = next((each for each in versions if each.ready_time_ms), None)
    seconds = found.ready_seconds if found else None
    return LastPush(
        version=found,
        time=words.took(seconds),
        rate=words.rate(found.tensor_bytes if found else 0, seconds),
        durable_time=words.took(found.durable_seconds if found else None),
        given_up=versions[0] if versions and newest and versions[0].state.given_up else None,
    )


def taken_ms(version: Version, progress: PushProgress) -> int:
    """Milliseconds from a version's opening to the last that is known of it."""
    return max((end for _, _, end in _times(version, progress)), default=0)


def spans_of(version: Version, progress: PushProgress, bar_ms: int) -> tuple[Span, ...]:
    """A version's times as parts of a bar; what does not fit into it is cut off.

    Args:
        version: which one.
        progress: of its push, as far as it is known.
        bar_ms: milliseconds for which the whole bar stands.
    """

    def of(kind: str, start: int, end: int) -> Span:
        place = min(UNITS * start // bar_ms, UNITS - _LEAST)
        length = max(_LEAST, UNITS * (end - start) // bar_ms)
        took = (
            f"given up after {readable_duration(end / 1000)}"
            if kind == "lost"
            else f"{kind} in {readable_duration((end - start) / 1000)}"
        )
        return Span(kind, place, min(length, UNITS - place), took)

    return tuple(of(*each) for each in _times(version, progress)) if bar_ms > 0 else ()


def _times(version: Version, progress: PushProgress) -> Iterator[tuple[str, int, int]]:
    """Times of a version: their kind, and the milliseconds from its opening to their beginning and end, whatever clocks have said."""
    moments = [
        ("received", version.ready_time_ms),
        ("verified", version.verified_time_ms),
        ("stored", version.durable_time_ms),
    ]
    if version.state.given_up:
        moments.append(("lost", progress.ended_ms))
    before = 0
    for kind, at_ms in moments:
        if at_ms and version.create_time_ms:
            end = max(before, at_ms - version.create_time_ms)
            yield kind, before, end
            before = end


def _held_up_text(ranks: Sequence[RankProgress]) -> str:
    found = held_up(ranks)
    if found is None:
        return ""
    late = "to declare" if found.declaring else "with its bytes"
    return f"rank {found.rank} was {readable_duration(found.behind_ms / 1000)} behind {late}"


def _cost_text(version: Version, ranks: Sequence[RankProgress]) -> str:
    received = max(version.received_bytes, sum(each.received_bytes for each in ranks))
    if not ranks and not received:
        return ""
    come = f"{readable_part(received, version.tensor_bytes)} had come"
    sealed = [each for each in ranks if each.sealed_time_ms]
    declared = [each for each in ranks if each.declared_time_ms]
    if sealed:
        last = max(sealed, key=lambda each: each.sealed_time_ms)
        come += f"; {len(sealed)} of {counted(len(ranks), 'rank')} had sealed, rank {last.rank} last"
    elif declared:
        last = max(declared, key=lambda each: each.declared_time_ms)
        come += f"; {len(declared)} of {counted(len(ranks), 'rank')} had declared, rank {last.rank} last"
    return come
