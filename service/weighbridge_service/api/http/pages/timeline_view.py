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
"""At most one in this many bars is clipped, so that the other bars remain distinguishable."""
_COMPARED = 2
"""Number of versions that are compared."""
_FAR = 2
"""Factor by which the longest bar must exceed the others to be clipped."""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version in the timeline, and the number of engines that serve it."""

    said: VersionSummary
    engines: int


@dataclass(frozen=True, slots=True)
class VersionPage:
    """A page of a model's versions in any state, newest first.

    Attributes:
        versions: the versions.
        before: the number below which the page begins; 0 for the newest.
        more: whether there are older versions.
        pushes: progress of the versions' pushes, as far as this process knows it, by version number.
    """

    versions: tuple[Version, ...]
    before: int
    more: bool
    pushes: Mapping[int, PushProgress]

    def progress_of(self, version: Version) -> PushProgress:
        """Progress of a version's push, as far as it is known."""
        return self.pushes.get(version.number, _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The versions of a page.

    Attributes:
        model: name of the model.
        rows: one for each version.
        before: the number below which this page begins; 0 for the newest.
        more_before: the number below which the next page begins; 0 if there is none.
        scale: duration that a full bar represents, as text; empty if no duration is known.
        clipped: whether a bar is clipped.
        metadata: metadata of the versions, as columns.
        plots: numbers in the metadata over steps.
        compared: numbers of the two versions that are preselected for a comparison, the older one first; empty if there
            are fewer than two.
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
        model: the model.
        page: a page of its versions.
        engines: the engines that serve the model.
        viewer: the page's viewer.
    """
    bar_ms = scale_ms(taken_ms(each, page.progress_of(each)) for each in page.versions)
    named: dict[int, list[str]] = {}
    for ref, number in sorted(model.refs.items(), key=lambda item: (item[0] not in (REF_LIVE, REF_LATEST), item)):
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
    """Milliseconds that a full bar represents: the longest of ``lengths``, unless it is far longer than nearly all
    others; 0 if all are 0.
    """
    found = sorted((each for each in lengths if each), reverse=True)
    if not found:
        return 0
    near = found[max(1, len(found) // _OUTLIERS)] if len(found) > 2 else found[0]
    return near if found[0] > _FAR * near else found[0]
