"""View of all models that the viewer may see. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.engines.facts import Engine
from weighbridge._core.resources import REF_LATEST, REF_LIVE, Model, Version
from weighbridge._core.text.counts import percent
from weighbridge_service.api.http.pages.engine_view import summary
from weighbridge_service.api.http.pages.version_summary import LastPush, last_push


@dataclass(frozen=True, slots=True)
class ListedModelFacts:
    """Facts about a model for the list of models.

    Attributes:
        model: the model.
        newest: its newest versions in any state, newest first.
        engines: engines that serve it.
    """

    model: Model
    newest: tuple[Version, ...]
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model in the list.

    Attributes:
        model: the model.
        live, latest: numbers of the versions that these refs name; 0 if none.
        receiving: a version that the service is receiving; None if there is none.
        receiving_percent: percentage of its bytes that have been received.
        held: numbers of the newest versions that are held.
        last: times of the last push.
        tags: names of other refs, each with the number of its version.
        engines: number of engines with each status, as text.
    """

    model: Model
    live: int
    latest: int
    receiving: Version | None
    receiving_percent: int
    held: tuple[int, ...]
    last: LastPush
    tags: tuple[tuple[str, int], ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelList:
    """A page of the list of models.

    Attributes:
        rows: one for each model.
        query: the search string.
        after: name of the model after which the page begins.
        more_after: name of the last model, if more follow; empty otherwise.
    """

    rows: tuple[ModelRow, ...]
    query: str
    after: str
    more_after: str


@dataclass(frozen=True, slots=True)
class IndexView:
    """The page of all models; each field is a fragment."""

    models: ModelList


def index_view(found: Sequence[ListedModelFacts], *, query: str = "", after: str = "", more: bool = False) -> IndexView:
    """The page of all models.

    Args:
        found: the models, in order.
        query: the search string.
        after: name of the model after which the page begins.
        more: whether more models follow.
    """
    more_after = found[-1].model.name if more and found else ""
    return IndexView(ModelList(tuple(map(_row, found)), query, after, more_after))


def is_busy(view: IndexView) -> bool:
    """Whether the service is receiving a version. If so, the page changes without notification."""
    return any(row.receiving is not None for row in view.models.rows)


def _row(facts: ListedModelFacts) -> ModelRow:
    model, newest = facts.model, facts.newest
    receiving = next((each for each in newest if each.state.receiving), None)
    return ModelRow(
        model=model,
        live=model.refs.get(REF_LIVE, 0),
        latest=model.refs.get(REF_LATEST, 0),
        receiving=receiving,
        receiving_percent=percent(receiving.received_bytes, receiving.tensor_bytes) if receiving else 0,
        held=tuple(each.number for each in newest if each.held and each.state.visible),
        last=last_push(newest),
        tags=tuple(sorted((ref, n) for ref, n in model.refs.items() if ref not in (REF_LIVE, REF_LATEST))),
        engines=summary(facts.engines),
    )
