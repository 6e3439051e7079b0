"""View of a model's refs, their protections, and the requests to change protected refs. Pure."""

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
"""Maximum number of versions that a form offers."""
_RECENT = 5
"""Maximum number of ended requests that are shown."""


@dataclass(frozen=True, slots=True)
class RefRow:
    """A ref.

    Attributes:
        ref: name of the ref.
        number: number of the version that it names; 0 if it is protected but not set.
        version: that version; None if it is not on the page.
        moves_by_itself: whether the service moves it (``live`` and ``latest``).
        protection: its protection; None if any identity that may move tags may move it.
        may_change: whether the viewer may move it, or request that.
        asks: whether a change requires approvals. If so, the form makes a request.
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
    """A request to change a protected ref, and whether the viewer may approve or withdraw it."""

    request: RefRequest
    may_approve: bool
    may_withdraw: bool


@dataclass(frozen=True, slots=True)
class RefsPart:
    """Refs and requests, the versions that can be tagged, and whether the viewer may set any tag."""

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
        model: the model.
        versions: versions on its page, newest first.
        protections: protections of its refs.
        requests: requests to change protected refs, oldest first.
        viewer: the page's viewer.
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
            scope.verb in (None, Verb.TAG) and scope.allows(Verb.LOOK, model.name, "") for scope in viewer.scopes
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
        may_withdraw=request.pending and viewer.may_change(request.model, request.ref, protections.get(request.ref)),
    )
