"""View of one model: its versions in time, what is being pushed, its refs and who may move them, and its exports. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import (
    REF_LATEST,
    REF_LIVE,
    Gate,
    Model,
    Protection,
    RefRequest,
    Retention,
    Version,
    VersionState,
    why_failed,
)
from weighbridge._core.text.counts import counted, percent, readable_count
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge_service.access.scopes import Verb
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.engine_view import Engines, engines_view, serving
from weighbridge_service.api.http.pages.push_view import LivePush, held_up_text, live_push
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.exports.jobs import ExportJob, ExportState

_UNITS = 1000
"""Width of the picture of a version's times."""
_RECENT_REQUESTS = 5
_OFFERED = 30
"""Versions that a form offers a tag for."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is read of a model.

    Attributes:
        model: the model.
        training: whether there are training states of it.
        versions: a page of its versions in whatever state, newest first.
        before: the number below which the page begins; 0 for the newest.
        more: whether there are older ones.
        ranks: how far the ranks of versions are that this process receives, or remembers, by number.
        protections, requests: of its refs.
        gate, retention: what is held, and kept.
        exports: its exports, newest first.
        engines: those that serve it, as their agents tell.
    """

    model: Model
    training: bool
    versions: tuple[Version, ...]
    before: int
    more: bool
    ranks: Mapping[int, tuple[RankProgress, ...]]
    protections: tuple[Protection, ...]
    requests: tuple[RefRequest, ...]
    gate: Gate
    retention: Retention
    exports: tuple[ExportJob, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What is said first.

    Attributes:
        name: of the model.
        part_of: the model whose training states these are; empty for a model itself.
        training: name of its training states; empty if there are none.
        facts: its type, dtype and so on.
        live, latest: the versions that these refs name, with their states; None if they name none that is on the page.
        live_number, latest_number: their numbers; 0 if none.
        last: the last version that is complete; None if there is none.
        push_time, push_rate, durable_time: what that cost.
        given_up: the newest version, if it has failed or was aborted; None otherwise.
        news: the newest thing that has happened, for screen readers.
    """

    name: str
    part_of: str
    training: str
    facts: tuple[str, ...]
    live: Version | None
    latest: Version | None
    live_number: int
    latest_number: int
    last: Version | None
    push_time: str
    push_rate: str
    durable_time: str
    given_up: Version | None
    news: str


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a bar: where it begins and how long it is, in `_UNITS`, and what it stands for."""

    kind: str
    start: int
    length: int
    text: str


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version in the timeline.

    Attributes:
        version: the version.
        refs: that name it.
        size: bytes of its tensors.
        spans: its times as parts of a bar: being received, verified and stored.
        times: the same in words.
        rate: bytes a second while it was received.
        held_up: who held whom up; empty if nobody did, or nobody knows.
        reason: why it failed, or is not durable yet.
        engines: how many serve it.
        may_approve: whether who looks may approve it, and it is held.
    """

    version: Version
    refs: tuple[str, ...]
    size: str
    spans: tuple[Span, ...]
    times: str
    rate: str
    held_up: str
    reason: str
    engines: int
    may_approve: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The versions of a page, newest first, and the number below which the next page begins; 0 if there is none."""

    model: str
    rows: tuple[VersionRow, ...]
    before: int
    more_before: int
    scale: str


@dataclass(frozen=True, slots=True)
class RefRow:
    """A ref.

    Attributes:
        ref: its name.
        number: the version that it names; 0 if it is only protected.
        version: that version, if it is on the page.
        moves_by_itself: whether nobody moves it.
        protection: what it takes to change it; None if anybody who may move tags does.
        may_change: whether who looks may move it, or ask for that.
        asks: whether a change of it is a request.
    """

    ref: str
    number: int
    version: Version | None
    moves_by_itself: bool
    protection: Protection | None
    may_change: bool
    asks: bool


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request to change a protected ref, and what who looks may do about it."""

    request: RefRequest
    text: str
    may_approve: bool
    may_withdraw: bool


@dataclass(frozen=True, slots=True)
class RefsPart:
    """Refs and requests, the versions that a tag can be given, and whether who looks may give some tag."""

    model: str
    rows: tuple[RefRow, ...]
    requests: tuple[RequestRow, ...]
    offered: tuple[Version, ...]
    may_tag: bool


@dataclass(frozen=True, slots=True)
class Pushes:
    """What is being received."""

    model: str
    pushes: tuple[LivePush, ...]


@dataclass(frozen=True, slots=True)
class ExportRow:
    """An export, and how far it is."""

    job: ExportJob
    percent: int
    bytes_text: str
    time: str
    may_cancel: bool


@dataclass(frozen=True, slots=True)
class ExportsPart:
    """Exports, and what can be exported by who looks."""

    model: str
    rows: tuple[ExportRow, ...]
    offered: tuple[Version, ...]
    may_export: bool


@dataclass(frozen=True, slots=True)
class KeepingPart:
    """What is held and kept, in words, and whether who looks may see what a collection would do."""

    model: str
    rules: tuple[str, ...]
    gate: tuple[str, ...]
    may_dry_run: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """The page of a model; each field is a fragment."""

    summary: Summary
    pushes: Pushes
    engines: Engines
    refs: RefsPart
    timeline: Timeline
    keeping: KeepingPart
    exports: ExportsPart


def model_view(facts: ModelFacts, viewer: Viewer, now_ms: int) -> ModelView:
    """The page of a model.

    Args:
        facts: what was read.
        viewer: who looks.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    name = facts.model.name
    return ModelView(
        summary=_summary(facts),
        pushes=Pushes(
            name,
            tuple(
                live_push(version, facts.ranks.get(version.number, ()), now_ms)
                for version in facts.versions
                if version.state in (VersionState.OPEN, VersionState.RECEIVING)
            ),
        ),
        engines=engines_view(name, facts.engines),
        refs=_refs(facts, viewer),
        timeline=_timeline(facts, viewer),
        keeping=KeepingPart(name, _rules(facts.retention), _gate(facts.gate), viewer.may(Verb.MANAGE, name)),
        exports=_exports(facts, viewer),
    )


def is_busy(view: ModelView) -> bool:
    """Whether something is being received, stored or exported, so that the page changes by itself."""
    exporting = any(not row.job.state.ended for row in view.exports.rows)
    moving = any(
        row.version.state in (VersionState.READY, VersionState.VERIFIED) and not row.version.error
        for row in view.timeline.rows
    )
    return bool(view.pushes.pushes) or exporting or moving


def _summary(facts: ModelFacts) -> Summary:
    model, by_number = facts.model, {each.number: each for each in facts.versions}
    name, _, part = model.name.partition(":")
    last = next((each for each in facts.versions if each.ready_time_ms), None)
    live, latest = model.refs.get(REF_LIVE, 0), model.refs.get(REF_LATEST, 0)
    push_ms = last.ready_time_ms - last.create_time_ms if last else 0
    described = (
        *([model.model_type] if model.model_type else []),
        *([model.dtype] if model.dtype else []),
        *([counted(model.tensor_count, "tensor")] if model.tensor_count else []),
        *([readable_size(model.tensor_bytes)] if model.tensor_bytes else []),
    )
    newest = facts.versions[0] if facts.versions and not facts.before else None
    return Summary(
        name=model.name,
        part_of=name if part else "",
        training=f"{name}:training" if facts.training else "",
        facts=described,
        live=by_number.get(live),
        latest=by_number.get(latest),
        live_number=live,
        latest_number=latest,
        last=last,
        push_time=readable_duration(push_ms / 1000) if last else words.NONE,
        push_rate=words.rate(last.tensor_bytes, push_ms) if last else words.NONE,
        durable_time=words.span(last.create_time_ms, last.durable_time_ms) if last else words.NONE,
        given_up=newest if newest and newest.state.given_up else None,
        news=f"Version {newest.number} is {newest.state.value}" if newest else "",
    )


def _timeline(facts: ModelFacts, viewer: Viewer) -> Timeline:
    longest = max((_end_ms(each) - each.create_time_ms for each in facts.versions), default=0)
    named: dict[int, list[str]] = {}
    for ref, number in sorted(
        facts.model.refs.items(), key=lambda item: (item[0] not in (REF_LIVE, REF_LATEST), item)
    ):
        named.setdefault(number, []).append(ref)
    served = serving(facts.engines)
    rows = tuple(
        _row(version, tuple(named.get(version.number, ())), facts, viewer, longest, served)
        for version in facts.versions
    )
    return Timeline(
        model=facts.model.name,
        rows=rows,
        before=facts.before,
        more_before=facts.versions[-1].number if facts.more and facts.versions else 0,
        scale=readable_duration(longest / 1000) if longest else "",
    )


def _row(
    version: Version,
    refs: tuple[str, ...],
    facts: ModelFacts,
    viewer: Viewer,
    longest: int,
    served: Mapping[int, int],
) -> VersionRow:
    push_ms = version.ready_time_ms - version.create_time_ms if version.ready_time_ms else 0
    spans = spans_of(version, longest)
    return VersionRow(
        version=version,
        refs=refs,
        size=readable_size(version.tensor_bytes) if version.tensor_bytes else words.NONE,
        spans=spans,
        times=", ".join(each.text for each in spans),
        rate=words.rate(version.tensor_bytes, push_ms),
        held_up=held_up_text(facts.ranks.get(version.number, ())),
        reason=why_failed(version) if version.state.given_up else version.error,
        engines=served.get(version.number, 0),
        may_approve=bool(version.held)
        and version.state.visible
        and viewer.may(Verb.APPROVE, facts.model.name, str(version.number)),
    )


def spans_of(version: Version, longest: int) -> tuple[Span, ...]:
    """A version's times as parts of a bar.

    Args:
        version: which one.
        longest: milliseconds for which the whole bar stands.
    """
    times = (
        ("received", version.create_time_ms, version.ready_time_ms),
        ("verified", version.ready_time_ms, version.verified_time_ms),
        ("stored", version.verified_time_ms, version.durable_time_ms),
    )
    origin = version.create_time_ms
    return tuple(
        Span(
            kind,
            _UNITS * (start - origin) // longest,
            max(2, _UNITS * (end - start) // longest),
            f"{kind} in {readable_duration(max(0, end - start) / 1000)}",
        )
        for kind, start, end in times
        if start and end and longest
    )


def _end_ms(version: Version) -> int:
    known = (version.durable_time_ms, version.verified_time_ms, version.ready_time_ms, version.create_time_ms)
    return next((each for each in known if each), 0)


def _refs(facts: ModelFacts, viewer: Viewer) -> RefsPart:
    name, by_number = facts.model.name, {each.number: each for each in facts.versions}
    protections = {each.ref: each for each in facts.protections}
    names = sorted(
        {*facts.model.refs, *protections}, key=lambda ref: (ref != REF_LIVE, ref != REF_LATEST, ref)
    )
    rows = tuple(_ref(ref, facts, viewer, protections.get(ref), by_number) for ref in names)
    pending = [each for each in facts.requests if each.pending]
    ended = [each for each in facts.requests if not each.pending][-_RECENT_REQUESTS:]
    return RefsPart(
        model=name,
        rows=rows,
        requests=tuple(_request(each, viewer, protections) for each in (*pending, *reversed(ended))),
        offered=tuple(each for each in facts.versions if each.state is VersionState.DURABLE)[:_OFFERED],
        may_tag=any(
            scope.verb in (None, Verb.TAG) and scope.allows(Verb.LOOK, name, "") for scope in viewer.scopes
        ),
    )


def _ref(
    ref: str,
    facts: ModelFacts,
    viewer: Viewer,
    protection: Protection | None,
    by_number: Mapping[int, Version],
) -> RefRow:
    number = facts.model.refs.get(ref, 0)
    itself = ref in (REF_LIVE, REF_LATEST)
    return RefRow(
        ref=ref,
        number=number,
        version=by_number.get(number),
        moves_by_itself=itself,
        protection=protection,
        may_change=not itself and viewer.may_change(facts.model.name, ref, protection),
        asks=protection is not None and protection.approvals > 0,
    )


def _request(request: RefRequest, viewer: Viewer, protections: Mapping[str, Protection]) -> RequestRow:
    to = f" to version {request.version}" if request.version else ""
    return RequestRow(
        request=request,
        text=f"{request.action} {request.ref}{to}",
        may_approve=viewer.may_approve(request),
        may_withdraw=request.pending
        and viewer.may_change(request.model, request.ref, protections.get(request.ref)),
    )


def _exports(facts: ModelFacts, viewer: Viewer) -> ExportsPart:
    may = viewer.may(Verb.MANAGE, facts.model.name)
    return ExportsPart(
        model=facts.model.name,
        rows=tuple(_export(job, may) for job in facts.exports),
        offered=tuple(each for each in facts.versions if each.state.visible)[:_OFFERED],
        may_export=may,
    )


def _export(job: ExportJob, may: bool) -> ExportRow:
    total = job.bytes_total
    done = 100 if job.state is ExportState.DONE else percent(job.bytes_done, total)
    return ExportRow(
        job=job,
        percent=done,
        bytes_text=f"{readable_size(job.bytes_done)} of {readable_size(total)}" if total else words.NONE,
        time=words.span(job.create_time_ms, job.end_time_ms),
        may_cancel=may and not job.state.ended,
    )


def _rules(retention: Retention) -> tuple[str, ...]:
    if retention.keeps_everything:
        return ("every version is kept",)
    rules: Sequence[tuple[int, str]] = (
        (retention.keep_last, f"the newest {counted(retention.keep_last, 'version')} are kept"),
        (retention.keep_every, f"of each {readable_count(retention.keep_every)} numbers the first is kept"),
        (retention.keep_younger_s, f"younger than {readable_duration(retention.keep_younger_s)}: kept"),
    )
    return (*(text for value, text in rules if value), "whatever a ref names or an engine serves is kept")


def _gate(gate: Gate) -> tuple[str, ...]:
    return (
        "every version is held until it is approved"
        if gate.approval_required
        else "candidates are held until they are approved",
        "NaN and infinity hold no version"
        if gate.allow_nonfinite
        else "a version with NaN or infinity is held",
    )
