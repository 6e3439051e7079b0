"""View of one version: its life cycle, the ranks that pushed it, its files and its tensors. Pure."""

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
"""Number of tensors on a page."""
_DETAILS = 50


@dataclass(frozen=True, slots=True)
class SignatureFacts:
    """A signature: its id, its method, and the key or certificate that made it."""

    id: str
    method: str
    signer: str


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Facts about a version, for its page.

    Attributes:
        version: the version.
        refs: refs that name it.
        progress: progress of its push, as far as it is known.
        contents: its files, tensors and provenance.
        signatures: its signatures.
        engines: the engines that serve its model, as their agents report.
    """

    version: Version
    refs: tuple[str, ...]
    progress: PushProgress
    contents: Contents
    signatures: tuple[SignatureFacts, ...]
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a version's life cycle: the state, when the version reached it, and how long that took; 0 and empty if
    it has not reached it.
    """

    state: str
    at_ms: int
    took: str


@dataclass(frozen=True, slots=True)
class VersionHeading:
    """The first part of a version's page: its summary, the engines that serve it, their update steps, and details of
    its failure.
    """

    said: VersionSummary
    engines: tuple[str, ...]
    steps: tuple[EngineStep, ...]
    details: tuple[str, ...]
    news: str


@dataclass(frozen=True, slots=True)
class Life:
    """The steps of a version's life cycle, and its summary with the same times as spans of a bar."""

    steps: tuple[Step, ...]
    said: VersionSummary


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's times since the version's opening, and the bytes that it has sent, as text."""

    rank: int
    declared: str
    sealed: str
    nbytes: str


@dataclass(frozen=True, slots=True)
class PushingRanks:
    """The ranks that push a version.

    Attributes:
        live: the push, while the version is being received; None otherwise.
        total: number of ranks.
        cells: the first ranks, as cells.
        rows: the first ranks, as rows of a table.
        missing: the ranks that have sent no request, as text; empty if there are none.
        held_up: the rank that delayed the others, as text; empty if none did, or it is unknown.
    """

    live: LivePush | None
    total: int
    cells: tuple[RankProgress, ...]
    rows: tuple[RankRow, ...]
    missing: str
    held_up: str


@dataclass(frozen=True, slots=True)
class About:
    """Origin of a version: step, run, lineage, provenance and approval as pairs, and its metadata and signatures."""

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
        model, number: model and number of the version.
        rows: the tensors.
        query: string to search for in tensor names.
        first: index of the page's first tensor among those found.
        found, total: number of tensors that match, and number of tensors in the version.
        pictures: whether the viewer may see their distributions.
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
        """Index at which the previous page begins; None if there is none."""
        return max(0, self.first - TENSORS) if self.first else None

    @property
    def following(self) -> int | None:
        """Index at which the next page begins; None if there is none."""
        return self.first + TENSORS if self.first + TENSORS < self.found else None


@dataclass(frozen=True, slots=True)
class VersionView:
    """The page of a version; each field is a fragment."""

    head: VersionHeading
    life: Life
    ranks: PushingRanks
    about: About
    files: Files
    tensors: Tensors


def version_view(facts: VersionFacts, viewer: Viewer, now_ms: int, *, query: str = "", first: int = 0) -> VersionView:
    """The page of a version.

    Args:
        facts: facts about the version.
        viewer: the page's viewer.
        now_ms: the time, in milliseconds since 1970 UTC.
        query: string that the names of the shown tensors contain.
        first: index of the first shown tensor among these.
    """
    version, progress = facts.version, facts.progress
    said = version_summary(version, facts.refs, progress, viewer, taken_ms(version, progress))
    return VersionView(
        head=VersionHeading(
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
    """Whether the version is being received, verified or stored. If so, the page changes without notification."""
    state = view.head.said.version.state
    return state.receiving or state in (VersionState.READY, VersionState.VERIFIED)


def as_pairs(fields: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Fields of a document as text."""
    return tuple((str(name), value if isinstance(value, str) else str(value)) for name, value in fields.items())


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


def _ranks(version: Version, progress: PushProgress, held_up: str, now_ms: int) -> PushingRanks:
    ranks, opened = progress.ranks, version.create_time_ms
    return PushingRanks(
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
        *([("non-finite elements", readable_count(version.nonfinite_elements))] if version.nonfinite_elements else []),
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
