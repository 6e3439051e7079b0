"""Questions about versions of one model that callers wait for, and their current answers, from one read of its head or
from memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.resources import RECEIVING, REF_LIVE, Version, VersionState
from weighbridge.errors import NotFound, WeighbridgeError
from weighbridge_service.catalog.catalog import AWAY, Catalog
from weighbridge_service.catalog.head_versions import number_in
from weighbridge_storage.documents.names import ModelName


@dataclass(frozen=True, slots=True)
class Question:
    """Question that a caller waits on.

    Attributes:
        version: a number, a ref, or `RECEIVING`.
        invisible: whether the answer may be a version that is being received or has failed.
    """

    version: str
    invisible: bool


@dataclass(frozen=True, slots=True)
class Found:
    """Answer with a version in its current state.

    Attributes:
        version: the version.
        abandoned: whether the version is visible and will not become durable.
    """

    version: Version
    abandoned: bool


class Unregistered(NotFound):
    """No such model: never registered, or deleted. Plain NotFound means that the model has no such version."""


Answer: TypeAlias = Found | WeighbridgeError


def look(catalog: Catalog, name: ModelName, questions: Iterable[Question]) -> dict[Question, Answer]:
    """Answers to questions about one model, from one read of its head, or from memory while the store cannot be
    reached.

    Raises:
        WeighbridgeError: the model's head cannot be read.
    """
    try:
        history = catalog.registered_history(name)
    except AWAY as error:
        return {question: _without_store(catalog, name, question, error) for question in questions}
    if history is None:
        return {question: _unregistered(catalog, name, question) for question in questions}
    asked = {number_in(each.version) for each in questions if each.invisible}
    history = catalog.without_orphans(name, history, history.head.open.keys() & asked)
    answers: dict[Question, Answer] = {}
    for question in questions:
        if question.version == RECEIVING:
            answers[question] = _receiving(catalog, name)
            continue
        try:
            version = catalog.resolve(name, question.version, history, invisible=question.invisible)
            answers[question] = _found(catalog, name, version)
        except WeighbridgeError as error:
            answers[question] = error
    return answers


def _without_store(catalog: Catalog, name: ModelName, question: Question, error: WeighbridgeError) -> Answer:
    """Answer while the store cannot be reached: from memory, or the store's error."""
    if question.version == RECEIVING:
        return _receiving(catalog, name)
    version = catalog.in_memory(name, question.version)
    return error if version is None else _found(catalog, name, version)


def _receiving(catalog: Catalog, name: ModelName) -> Found | NotFound:
    """Newest version that this process receives and that may become ``live``: it is not held, and no newer one is
    visible.
    """
    known = [each.version for each in catalog.snapshots.of_model(name).values() if not each.version.held]
    newest = max((each.number for each in known if each.state.visible), default=0)
    receiving = [each for each in known if each.state is VersionState.RECEIVING and each.number > newest]
    if not receiving:
        return NotFound(f"no version of {name} is being received that may become live")
    return Found(max(receiving, key=lambda each: each.number), abandoned=False)


def _unregistered(catalog: Catalog, name: ModelName, question: Question) -> Answer:
    """Answer to a question about a model that is not registered."""
    if question.invisible:  # asked once, not polled: the suggestion of a similar name lists all models
        try:
            catalog.history(name)
        except NotFound as error:
            return Unregistered(error.message, fix=error.fix)
    return Unregistered(f"there is no model {name}", fix="register it first")


def _found(catalog: Catalog, name: ModelName, version: Version) -> Found:
    known = catalog.snapshots.get(name, version.number)
    return Found(version, known is not None and known.abandoned)


def from_memory(catalog: Catalog, name: ModelName, question: Question) -> Found | None:
    """Answer from memory, without a read of the model's head: the newest version that this process receives, or a
    version that is visible and not durable yet, by its number or as ``live``. None if memory does not answer the
    question.

    Memory does not answer for durable versions, which may have been deleted since, nor for ``live`` if this process has
    not read the head.
    """
    if question.version == RECEIVING:
        receiving = _receiving(catalog, name)
        return receiving if isinstance(receiving, Found) else None
    if question.version == REF_LIVE and catalog.heads.last_read(name) is None:
        return None
    version = catalog.in_memory(name, question.version)
    return None if version is None or version.state.stored else _found(catalog, name, version)


def differs(before: Answer | None, after: Answer) -> bool:
    """Whether an answer differs from the previous one for a waiting caller.

    The number of received bytes does not count.
    """
    if isinstance(before, Found) and isinstance(after, Found):
        return (before.version.number, before.version.state, before.abandoned) != (
            after.version.number,
            after.version.state,
            after.abandoned,
        )
    return type(before) is not type(after)
