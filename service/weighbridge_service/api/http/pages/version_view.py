"""View of one version: its life, who pushed it, its files and its tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.engines.golden import readable_metadata
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.text.counts import readable_count
from weighbridge._core.text.sizes import readable_part, readable_size
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.engine_view import EngineStep, serving_it, steps_to
from weighbridge_service.api.http.pages.push_view import SHOWN, LivePush, live_push, missing_text
from weighbridge_service.api.http.pages.side_by_side.contents import Contents, FileFacts, TensorFacts
from weighbridge_service.api.http.pages.version_summary import VersionSummary, taken_ms, version_summary
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.push.machine.rank_progress import PushProgress

TENSORS = 100
"""Tensors on a page."""
_DETAILS = 50


@dataclass(frozen=True, slots=True)
class SignatureFacts:
    """A signature: its id, how it was made, and with which key or certificate."""

    id: str
    method: str
    signer: str


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """What is read of a version.

    Attributes:
        version: the version.
        refs: that name it.
        progress: how far its push is, or was, as far as that is known.
        contents: what lies in it.
        signatures: of it.
        engines: that serve its model, as their agents tell.
    """

    version: Version
    refs: tuple[str, ...]
    progress: PushProgress
    contents: Contents
    signatures: tuple[SignatureFacts, ...]
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a version's life: when it came so far, and what that took; 0 and empty if it has not."""

    state: str
    at_ms: int
    took: str


@dataclass(frozen=True, slots=True)
class Head:
    """What is said first: of the version, the engines that serve it, the steps that took them to it, and details of its failure."""

    said: VersionSummary
    engines: tuple[str, ...]
    steps: tuple[EngineStep, ...]
    details: tuple[str, ...]
    news: str


@dataclass(frozen=True, slots=True)
class Life:
    """A version's steps, and the same as parts of a bar."""

    steps: tuple[Step, ...]
    said: VersionSummary


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's times, from the opening on."""

    rank: int
    declared: str
    sealed: str
    nbytes: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who pushed a version: the push while it is being received, its ranks, those of which nothing was heard, and who held whom up."""

    live: LivePush | None
    total: int
    cells: tuple[RankProgress, ...]
    rows: tuple[RankRow, ...]
    missing: str
    held_up: str


@dataclass(frozen=True, slots=True)
class About:
    """Where a version comes from: run, metadata, lineage, provenance, approval and signatures, as pairs."""

    pairs: tuple[tuple[str, str], ...]
    metadata: tuple[tuple[str, str], ...]
    signatures: tuple[SignatureFacts, ...]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a version."""

    model: str
    number: int
    rows: tuple[FileFacts, ...]
    total: str


@dataclass(frozen=True, slots=True)
class Tensors:
    """A page of a version's tensors.

    Attributes:
        model, number: of which version.
        rows: the tensors.
        query: what their names were searched for.
        first: place of the first one among those found.
        found, total: how many were found, and how many there are.
        pictures: whether who looks may see their distributions.
    """

    model: str
    number: int
    rows: tuple[TensorFacts, ...]
    query: str
    first: int
    found: int
    total: int
    pictures: bool

    @property
    def previous(self) -> int | None:
        """Where the page before begins; None if there is none."""
        return max(0, self.first - TENSORS) if self.first else None

    @property
    def following(self) -> int | None:
        """Where the page behind begins; None if there is none."""
        return self.first + TENSORS if self.first + TENSORS < self.found else None


@dataclass(frozen=True, slots=True)
class VersionView:
    """The page of a version; each field is a fragment."""

    head: Head
    life: Life
    ranks: Ranks
    about: About
    files: Files
    tensors: Tensors


def version_view(
    facts: VersionFacts, viewer: Viewer, now_ms: int, *, query: str = "", first: int = 0
) -> VersionView:
    """The page of a version.

    Args:
        facts: what was read.
        viewer: who looks.
        now_ms: the time, in milliseconds since 1970 UTC.
        query: part of the names of the tensors that are shown.
        first: place of the first one.
    """
    version, progress = facts.version, facts.progress
    said = version_summary(version, facts.refs, progress, viewer, taken_ms(version, progress))
    return VersionView(
        head=Head(
            said=said,
            engines=serving_it(facts.engines, version.number),
            steps=steps_to(facts.engines, version.number),
            details=version.error_details[:_DETAILS],
            news=f"Version {version.number} is {version.state.value}",
        ),
        life=Life(_steps(version), said),
        ranks=_ranks(version, progress, said.held_up, now_ms),
        about=_about(facts),
        files=Files(
            version.model,
            version.number,
            facts.contents.files,
            readable_size(sum(each.size for each in facts.contents.files)),
        ),
        tensors=_tensors(facts, viewer, query, first),
    )


def is_busy(view: VersionView) -> bool:
    """Whether something happens to the version, so that the page changes by itself."""
    state = view.head.said.version.state
    return state.receiving or state in (VersionState.READY, VersionState.VERIFIED)


def as_pairs(fields: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Fields of a document as text."""
    return tuple(
        (str(name), value if isinstance(value, str) else str(value)) for name, value in fields.items()
    )


def _steps(version: Version) -> tuple[Step, ...]:
    moments = (
        ("opened", version.create_time_ms),
        ("ready", version.ready_time_ms),
        ("verified", version.verified_time_ms),
        ("durable", version.durable_time_ms),
    )
    before = 0
    steps = []
    for state, at_ms in moments:
        steps.append(Step(state, at_ms, words.span(before, at_ms) if before and at_ms else ""))
        before = at_ms or before
    return tuple(steps)


def _ranks(version: Version, progress: PushProgress, held_up: str, now_ms: int) -> Ranks:
    ranks, opened = progress.ranks, version.create_time_ms
    return Ranks(
        live=live_push(version, progress, now_ms) if version.state.receiving else None,
        total=version.ranks,
        cells=ranks[:SHOWN],
        rows=tuple(
            RankRow(
                each.rank,
                words.span(opened, each.declared_time_ms),
                words.span(opened, each.sealed_time_ms),
                readable_part(each.received_bytes, each.total_bytes)
                if each.received_bytes < each.total_bytes
                else readable_size(each.total_bytes),
            )
            for each in ranks[:TENSORS]
        ),
        missing=missing_text(ranks),
        held_up=held_up,
    )


def _about(facts: VersionFacts) -> About:
    version = facts.version
    pairs = (
        ("step", str(version.step)),
        *([("run", version.run)] if version.run else []),
        *([] if facts.contents.provenance else [("ranks", str(version.ranks))]),
        *facts.contents.lineage,
        *facts.contents.provenance,
        *(
            [("non-finite elements", readable_count(version.nonfinite_elements))]
            if version.nonfinite_elements
            else []
        ),
        *([("approved", version.approval_text)] if version.approved_reasons else []),
    )
    return About(pairs, as_pairs(readable_metadata(version.metadata)), facts.signatures)


def _tensors(facts: VersionFacts, viewer: Viewer, query: str, first: int) -> Tensors:
    there, version = facts.contents.tensors, facts.version
    found = [each for each in there if query in each.name] if query else there
    first = first if first < len(found) else 0
    return Tensors(
        model=version.model,
        number=version.number,
        rows=tuple(found[first : first + TENSORS]),
        query=query,
        first=first,
        found=len(found),
        total=len(there),
        pictures=version.state.visible and viewer.may(Verb.PULL, version.model),
    )
