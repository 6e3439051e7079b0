"""View of a model's exports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import percent
from weighbridge._core.text.sizes import readable_part
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.refs_view import OFFERED
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.exports.jobs import ExportJob, ExportState


@dataclass(frozen=True, slots=True)
class ExportRow:
    """An export and its progress."""

    job: ExportJob
    percent: int
    bytes_text: str
    time: str
    may_cancel: bool


@dataclass(frozen=True, slots=True)
class ExportsPart:
    """Exports of a model, and the versions that the viewer can export."""

    model: str
    rows: tuple[ExportRow, ...]
    offered: tuple[Version, ...]
    may_export: bool


def exports_view(model: str, jobs: Sequence[ExportJob], versions: Sequence[Version], viewer: Viewer) -> ExportsPart:
    """The exports of a model.

    Args:
        model: name of the model.
        jobs: its exports, newest first.
        versions: versions on its page, newest first.
        viewer: the page's viewer.
    """
    may = viewer.may(Verb.MANAGE, model)
    return ExportsPart(
        model=model,
        rows=tuple(_export(job, may) for job in jobs),
        offered=tuple(each for each in versions if each.state.visible)[:OFFERED],
        may_export=may,
    )


def _export(job: ExportJob, may: bool) -> ExportRow:
    total = job.bytes_total
    done = 100 if job.state is ExportState.DONE else percent(job.bytes_done, total)
    return ExportRow(
        job=job,
        percent=done,
        bytes_text=readable_part(job.bytes_done, total) if total else words.NONE,
        time=words.span(job.create_time_ms, job.end_time_ms),
        may_cancel=may and not job.state.ended,
    )
