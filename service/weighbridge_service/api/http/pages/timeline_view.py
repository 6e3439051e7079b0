"""View of a model's versions in time, newest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.resources import REF_LATEST, REF_LIVE, Model, Version
from weighbridge._core.text.durations import readable_duration
from weighbridge_service.api.http.pages.engine_view import serving
from weighbridge_service.api.http.pages.side_by_side.metadata_columns import (
    MetadataColumns,
    metadata_columns,
)
from weighbridge_service.api.http.pages.side_by_side.metadata_plots import Plot, metadata_plots
from weighbridge_service.api.http.pages.version_summary import VersionSummary, taken_ms, version_summary
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.push.machine.rank_progress import PushProgress

_UNKNOWN = PushProgress()
_OUTLIERS = 10
"""One of so many versions may be cut off, so that the others can be told apart."""
_COMPARED = 2
"""Versions that are compared."""
_FAR = 2
"""By what factor the longest must be longer than the others for that."""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version in the timeline, and how many engines serve it."""

    said: VersionSummary
    engines: int


@dataclass(frozen=True, slots=True)
class VersionPage:
    """A page of a model's versions in whatever state, newest first.

    Attributes:
        versions: those.
        before: the number below which the page begins; 0 for the newest.
        more: whether there are older ones.
        pushes: how far those pushes are or were that are known here, by number.
    """

    versions: tuple[Version, ...]
    before: int
    more: bool
    pushes: Mapping[int, PushProgress]

    def progress_of(self, version: Version) -> PushProgress:
        """How far a push is or was, as far as that is known."""
        return self.pushes.get(version.number, _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The versions of a page.

    Attributes:
        model: whose.
        rows: one for each.
        before: as of the page.
        more_before: the number below which the next page begins; 0 if there is none.
        scale: for how long a whole bar stands.
        clipped: whether a bar is cut off.
        metadata: of the versions, as columns.
        plots: numbers of it over steps.
        compared: the numbers of the two versions that are offered for a comparison first, the older one first; empty if there are no two.
    """

    model: str
    rows: tuple[VersionRow, ...]
    before: int
    more_before: int
    scale: str
    clipped: bool
    metadata: MetadataColumns
    plots: tuple[Plot, ...]
    compared: tuple[int, ...]


def timeline_view(model: Model, page: VersionPage, engines: Sequence[Engine], viewer: Viewer) -> Timeline:
    """The versions of a model in time.

    Args:
        model: which one.
        page: of its versions.
        engines: that serve it.
        viewer: who looks.
    """
    bar_ms = scale_ms(taken_ms(each, page.progress_of(each)) for each in page.versions)
    named: dict[int, list[str]] = {}
    for ref, number in sorted(
        model.refs.items(), key=lambda item: (item[0] not in (REF_LIVE, REF_LATEST), item)
    ):
        named.setdefault(number, []).append(ref)
    served = serving(engines)
    whole = [each.number for each in page.versions if each.state.visible]
    rows = tuple(
        VersionRow(
            version_summary(each, tuple(named.get(each.number, ())), page.progress_of(each), viewer, bar_ms),
            served.get(each.number, 0),
        )
        for each in page.versions
    )
    return Timeline(
        model=model.name,
        rows=rows,
        before=page.before,
        more_before=page.versions[-1].number if page.more and page.versions else 0,
        scale=readable_duration(bar_ms / 1000) if bar_ms else "",
        clipped=any(row.said.clipped for row in rows),
        metadata=metadata_columns(page.versions),
        plots=metadata_plots([each for each in page.versions if not each.state.given_up]),
        compared=tuple(reversed(whole[:_COMPARED])) if len(whole) >= _COMPARED else (),
    )


def scale_ms(lengths: Iterable[int]) -> int:
    """Milliseconds for which whole bars of these lengths stand: the longest, unless it is far longer than nearly all others."""
    found = sorted((each for each in lengths if each), reverse=True)
    if not found:
        return 0
    near = found[max(1, len(found) // _OUTLIERS)] if len(found) > 2 else found[0]
    return near if found[0] > _FAR * near else found[0]
