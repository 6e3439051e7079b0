"""Summary of a version, for its own page and its model's: its times, why it failed or is held, and which rank delayed
the others. Pure.
"""

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
"""Width of a bar with a version's times."""
_LEAST = 2
"""Minimum width of a span in the bar."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a bar: its kind, its start and length (a full bar has `UNITS`), and its text."""

    kind: str
    start: int
    length: int
    text: str


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """Summary of a version.

    Attributes:
        version: the version.
        refs: refs that name it.
        size: size of its tensors, as text.
        spans: its times as spans of a bar: received, verified and stored, or lost if the push was aborted or failed.
        clipped: whether it took longer than a full bar represents.
        rate: rate at which it was received, as text.
        cost: for an aborted or failed version, the bytes that had been received, and the last rank that sealed or
            declared; empty if unknown.
        held_up: the rank that delayed the others; empty if none did, or it is unknown.
        reason: why it failed, or is not durable yet.
        held: why it is held; empty if it is not.
        may_approve: whether it is held and the viewer may approve it.
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
        """Its times as text."""
        return ", ".join(each.text for each in self.spans)


def version_summary(
    version: Version, refs: tuple[str, ...], progress: PushProgress, viewer: Viewer, bar_ms: int
) -> VersionSummary:
    """The summary of a version.

    Args:
        version: the version.
        refs: refs that name it.
        progress: progress of its push, as far as it is known.
        viewer: the page's viewer.
        bar_ms: milliseconds that a full bar represents.
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
    """The last completed push of a model.

    Attributes:
        version: the version that was pushed; None if there is none.
        time, rate: duration and rate of receiving it, as text.
        durable_time: duration until it was durable, as text.
        given_up: the newest version, if it has failed or was aborted; None otherwise.
    """

    version: Version | None
    time: str
    rate: str
    durable_time: str
    given_up: Version | None

    @property
    def opened_ms(self) -> int:
        """Time at which the version was opened, in milliseconds since 1970 UTC; 0 if there is none."""
        return self.version.create_time_ms if self.version else 0


def last_push(versions: Sequence[Version], *, newest: bool = True) -> LastPush:
    """The last completed push.

    Args:
        versions: versions of the model, newest first.
        newest: whether the model's newest version is among them.
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
    """Milliseconds from a version's opening to its latest known event; 0 if none is known."""
    return max((end for _, _, end in _times(version, progress)), default=0)


def spans_of(version: Version, progress: PushProgress, bar_ms: int) -> tuple[Span, ...]:
    """A version's times as spans of a bar; times beyond its end are clipped.

    Args:
        version: the version.
        progress: progress of its push, as far as it is known.
        bar_ms: milliseconds that the full bar represents.
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
    """Times of a version: kind, and start and end in milliseconds since its opening.

    They never decrease, even if clocks were set back.
    """
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
    come = f"{readable_part(received, version.tensor_bytes)} had arrived"
    sealed = [each for each in ranks if each.sealed_time_ms]
    declared = [each for each in ranks if each.declared_time_ms]
    if sealed:
        last = max(sealed, key=lambda each: each.sealed_time_ms)
        come += f"; {len(sealed)} of {counted(len(ranks), 'rank')} had sealed, rank {last.rank} last"
    elif declared:
        last = max(declared, key=lambda each: each.declared_time_ms)
        come += f"; {len(declared)} of {counted(len(ranks), 'rank')} had declared, rank {last.rank} last"
    return come
