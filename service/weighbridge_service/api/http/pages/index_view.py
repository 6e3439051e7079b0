"""View of all models that somebody may look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.resources import REF_LATEST, REF_LIVE, Model, Version, VersionState
from weighbridge._core.text.counts import percent
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.engine_view import summary
from weighbridge_service.api.http.pages.version_summary import push_ms


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is read of a model for a list.

    Attributes:
        model: the model.
        newest: its newest versions, whatever their states, newest first.
        engines: those that serve it.
    """

    model: Model
    newest: tuple[Version, ...]
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model in the list.

    Attributes:
        name, model_type, dtype: of the model.
        size: bytes of its tensors.
        live, latest: the versions that these refs name; 0 if none.
        receiving: a version that is being received; None if there is none.
        receiving_percent: of its bytes that have come.
        failed: the newest version, if it has failed; None otherwise.
        held: newest versions that are held.
        pushed_ms: when the last version was opened that is complete; 0 if there is none.
        push_time, push_rate: what receiving it took.
        tags: other refs and what they name.
        engines: how many serve it, by their standing, in words.
    """

    name: str
    model_type: str
    dtype: str
    size: str
    live: int
    latest: int
    receiving: Version | None
    receiving_percent: int
    failed: Version | None
    held: tuple[int, ...]
    pushed_ms: int
    push_time: str
    push_rate: str
    tags: tuple[tuple[str, int], ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelList:
    """The list, or a page of it.

    Attributes:
        rows: one for each model.
        query: what was searched for.
        after: the model behind which it begins.
        more_after: the last one, if there are more; empty otherwise.
    """

    rows: tuple[ModelRow, ...]
    query: str
    after: str
    more_after: str


@dataclass(frozen=True, slots=True)
class IndexView:
    """The page of all models; each field is a fragment."""

    models: ModelList


def index_view(
    found: Sequence[ModelFacts], *, query: str = "", after: str = "", more: bool = False
) -> IndexView:
    """The page of all models.

    Args:
        found: the models, in order.
        query: what was searched for.
        after: the model behind which they begin.
        more: whether there are others behind them.
    """
    more_after = found[-1].model.name if more and found else ""
    return IndexView(ModelList(tuple(map(_row, found)), query, after, more_after))


def is_busy(view: IndexView) -> bool:
    """Whether something is being received, so that the page changes by itself."""
    return any(row.receiving is not None for row in view.models.rows)


def _row(facts: ModelFacts) -> ModelRow:
    model, newest = facts.model, facts.newest
    complete = next((each for each in newest if each.ready_time_ms), None)
    receiving = next(
        (each for each in newest if each.state in (VersionState.OPEN, VersionState.RECEIVING)), None
    )
    took_ms = push_ms(complete) if complete else 0
    return ModelRow(
        name=model.name,
        model_type=model.model_type,
        dtype=model.dtype,
        size=readable_size(model.tensor_bytes),
        live=model.refs.get(REF_LIVE, 0),
        latest=model.refs.get(REF_LATEST, 0),
        receiving=receiving,
        receiving_percent=percent(receiving.received_bytes, receiving.tensor_bytes) if receiving else 0,
        failed=newest[0] if newest and newest[0].state.given_up else None,
        held=tuple(each.number for each in newest if each.held and each.state.visible),
        pushed_ms=complete.create_time_ms if complete else 0,
        push_time=readable_duration(took_ms / 1000) if complete else words.NONE,
        push_rate=words.rate(complete.tensor_bytes, took_ms) if complete else words.NONE,
        tags=tuple(sorted((ref, n) for ref, n in model.refs.items() if ref not in (REF_LIVE, REF_LATEST))),
        engines=summary(facts.engines),
    )
