"""View of one model: the versions that its refs name, the times of its last push, and the parts with views of their
own. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.operations.verbs import Verb
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
)
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size
from weighbridge_service.api.http.pages.engine_view import Engines, engines_view
from weighbridge_service.api.http.pages.exports_view import ExportsPart, exports_view
from weighbridge_service.api.http.pages.push_view import PushesView, pushes_view
from weighbridge_service.api.http.pages.refs_view import RefsPart, refs_view
from weighbridge_service.api.http.pages.timeline_view import Timeline, VersionPage, timeline_view
from weighbridge_service.api.http.pages.version_summary import LastPush, last_push
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.exports.jobs import ExportJob

_ADAPTERS = 20
"""Maximum number of adapters that a model's page lists."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, for its page.

    Attributes:
        model: the model.
        training: whether it has training states.
        page: a page of its versions.
        protections, requests: protections of its refs, and requests to change them.
        gate, retention: rules that determine which versions are held, and which are kept.
        exports: its exports, newest first.
        engines: the engines that serve it, as their agents report.
    """

    model: Model
    training: bool
    page: VersionPage
    protections: tuple[Protection, ...]
    requests: tuple[RefRequest, ...]
    gate: Gate
    retention: Retention
    exports: tuple[ExportJob, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The first part of a model's page.

    Attributes:
        name: name of the model.
        part_of: the model whose training states these are; empty for a model itself.
        training: name of its training states; empty if there are none.
        base: for an adapter, the base of its newest version, as ``acme/smol@17``; empty for any other model.
        adapters: the first adapters whose base is a version of this model.
        more_adapters: number of further adapters.
        facts: model type, dtype, number of tensors and size, as text.
        live, latest: the versions that these refs name, with their states; None if the ref is not set or its version is
            not on the page.
        live_number, latest_number: numbers of these versions; 0 if the ref is not set.
        last: times of the last push.
        news: the state of the newest version, for screen readers.
    """

    name: str
    part_of: str
    training: str
    base: str
    adapters: tuple[str, ...]
    more_adapters: int
    facts: tuple[str, ...]
    live: Version | None
    latest: Version | None
    live_number: int
    latest_number: int
    last: LastPush
    news: str


@dataclass(frozen=True, slots=True)
class RetentionPart:
    """Rules that determine which versions are kept and held, and whether the viewer may preview a collection."""

    model: str
    retention: Retention
    gate: Gate
    may_dry_run: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """The page of a model; each field is a fragment."""

    summary: Summary
    pushes: PushesView
    engines: Engines
    refs: RefsPart
    timeline: Timeline
    retention: RetentionPart
    exports: ExportsPart


def model_view(facts: ModelFacts, viewer: Viewer, now_ms: int) -> ModelView:
    """The page of a model.

    Args:
        facts: facts about the model.
        viewer: the page's viewer.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    model, page = facts.model, facts.page
    return ModelView(
        summary=_summary(facts),
        pushes=pushes_view(model.name, page, now_ms),
        engines=engines_view(model.name, facts.engines),
        refs=refs_view(model, page.versions, facts.protections, facts.requests, viewer),
        timeline=timeline_view(model, page, facts.engines, viewer),
        retention=RetentionPart(model.name, facts.retention, facts.gate, viewer.may(Verb.MANAGE, model.name)),
        exports=exports_view(model.name, facts.exports, page.versions, viewer),
    )


def is_busy(view: ModelView) -> bool:
    """Whether the service is receiving, storing or exporting a version.

    If so, the page changes without notification.
    """
    exporting = any(not row.job.state.ended for row in view.exports.rows)
    moving = any(
        each.state in (VersionState.READY, VersionState.VERIFIED) and not each.error
        for each in (row.said.version for row in view.timeline.rows)
    )
    return bool(view.pushes.pushes) or exporting or moving


def _summary(facts: ModelFacts) -> Summary:
    model, page = facts.model, facts.page
    by_number = {each.number: each for each in page.versions}
    name, _, part = model.name.partition(":")
    live, latest = model.refs.get(REF_LIVE, 0), model.refs.get(REF_LATEST, 0)
    described = (
        *([model.model_type] if model.model_type else []),
        *([model.dtype] if model.dtype else []),
        *([counted(model.tensor_count, "tensor")] if model.tensor_count else []),
        *([readable_size(model.tensor_bytes)] if model.tensor_bytes else []),
    )
    newest = page.versions[0] if page.versions and not page.before else None
    return Summary(
        name=model.name,
        part_of=name if part else "",
        training=f"{name}:training" if facts.training else "",
        base=model.base,
        adapters=model.adapters[:_ADAPTERS],
        more_adapters=max(len(model.adapters) - _ADAPTERS, 0),
        facts=described,
        live=by_number.get(live),
        latest=by_number.get(latest),
        live_number=live,
        latest_number=latest,
        last=last_push(page.versions, newest=not page.before),
        news=f"Version {newest.number} is {newest.state.value}" if newest else "",
    )
