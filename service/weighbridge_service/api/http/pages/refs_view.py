"""View of a model's refs, who may move them, and what is asked of those that are protected. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import (
    REF_LATEST,
    REF_LIVE,
    Model,
    Protection,
    RefRequest,
    Version,
    VersionState,
)
from weighbridge_service.api.http.pages.viewer import Viewer

OFFERED = 30
"""Versions that a form offers."""
_RECENT = 5
"""Requests that have ended which are shown."""


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


def refs_view(
    model: Model,
    versions: Sequence[Version],
    protections: Sequence[Protection],
    requests: Sequence[RefRequest],
    viewer: Viewer,
) -> RefsPart:
    """The refs of a model.

    Args:
        model: which one.
        versions: of its page, newest first.
        protections: of its refs.
        requests: to change those, in the order in which they were made.
        viewer: who looks.
    """
    protected, by_number = {each.ref: each for each in protections}, {each.number: each for each in versions}
    names = sorted({*model.refs, *protected}, key=lambda ref: (ref != REF_LIVE, ref != REF_LATEST, ref))
    pending = [each for each in requests if each.pending]
    ended = [each for each in requests if not each.pending][-_RECENT:]
    return RefsPart(
        model=model.name,
        rows=tuple(_ref(ref, model, viewer, protected.get(ref), by_number) for ref in names),
        requests=tuple(_request(each, viewer, protected) for each in (*pending, *reversed(ended))),
        offered=tuple(each for each in versions if each.state is VersionState.DURABLE)[:OFFERED],
        may_tag=any(
            scope.verb in (None, Verb.TAG) and scope.allows(Verb.LOOK, model.name, "")
            for scope in viewer.scopes
        ),
    )


def _ref(
    ref: str,
    model: Model,
    viewer: Viewer,
    protection: Protection | None,
    by_number: Mapping[int, Version],
) -> RefRow:
    number = model.refs.get(ref, 0)
    itself = ref in (REF_LIVE, REF_LATEST)
    return RefRow(
        ref=ref,
        number=number,
        version=by_number.get(number),
        moves_by_itself=itself,
        protection=protection,
        may_change=not itself and viewer.may_change(model.name, ref, protection),
        asks=protection is not None and protection.approvals > 0,
    )


def _request(request: RefRequest, viewer: Viewer, protections: Mapping[str, Protection]) -> RequestRow:
    return RequestRow(
        request=request,
        may_approve=viewer.may_approve(request),
        may_withdraw=request.pending
        and viewer.may_change(request.model, request.ref, protections.get(request.ref)),
    )
