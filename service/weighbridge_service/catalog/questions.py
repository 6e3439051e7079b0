"""Questions about versions of one model that somebody waits for, and their answers as things stand: of one reading of its head, or of memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.resources import RECEIVING, REF_LIVE, Version, VersionState
from weighbridge.errors import NotFound, WeighbridgeError
from weighbridge_service.catalog.catalog import AWAY, Catalog
from weighbridge_service.catalog.head_versions import number_in
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody waits for.

    Attributes:
        version: a number, a ref, or `RECEIVING`.
        invisible: whether it may be a version that is being received or has failed.
    """

    version: str
    invisible: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A version as it stands.

    Attributes:
        version: the version.
        abandoned: whether it is visible and will not become durable.
    """

    version: Version
    abandoned: bool


class Unregistered(NotFound):
    """No such model: never registered, or deleted. Another answer than that the model has no such version."""


Answer: TypeAlias = Found | WeighbridgeError


def look(catalog: Catalog, name: ModelName, questions: Iterable[Question]) -> dict[Question, Answer]:
    """The answers to questions about one model, from one reading of its head; from memory while the store is away.

    Raises:
        WeighbridgeError: the model's head cannot be read.
    """
    try:
        history = catalog.registered_history(name)
    except AWAY as error:
        return {question: _without_store(catalog, name, question, error) for question in questions}
    if history is None:
        return {question: _unregistered(catalog, name, question) for question in questions}
    if any(
        question.invisible and _is_overdue(catalog, name, history.head, question.version)
        for question in questions
    ):
        # whoever waits for it would wait until somebody else comes by
        with suppress(WeighbridgeError):  # this process may not be allowed to, or the store is away
            history = catalog.give_up_abandoned(name)
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
    """The answer while the store is away: from memory, or that it is."""
    if question.version == RECEIVING:
        return _receiving(catalog, name)
    version = catalog.in_memory(name, question.version)
    return error if version is None else _found(catalog, name, version)


def _receiving(catalog: Catalog, name: ModelName) -> Found | NotFound:
    """The newest version that this process receives and that will be ``live``: it is not held, and no newer one is visible."""
    known = [each.version for each in catalog.snapshots.of_model(name).values() if not each.version.held]
    newest = max((each.number for each in known if each.state.visible), default=0)
    receiving = [each for each in known if each.state is VersionState.RECEIVING and each.number > newest]
    if not receiving:
        return NotFound(f"no version of {name} is being received that may become live")
    return Found(max(receiving, key=lambda each: each.number), abandoned=False)


def _unregistered(catalog: Catalog, name: ModelName, question: Question) -> Answer:
    """The answer to a question about a model that is not registered."""
    if question.invisible:  # asked once: the name that was perhaps meant takes a list of all models
        try:
            catalog.history(name)
        except NotFound as error:
            return Unregistered(error.message, fix=error.fix)
    return Unregistered(f"there is no model {name}", fix="register it first")


def _is_overdue(catalog: Catalog, name: ModelName, head: Head, version: str) -> bool:
    """Whether a version is being received by nobody any more: the process that received it has ended without a word."""
    number = number_in(version)
    entry = None if number is None else head.open.get(number)
    return (
        entry is not None and entry.until_ms < unix_ms() and catalog.snapshots.get(name, entry.number) is None
    )


def _found(catalog: Catalog, name: ModelName, version: Version) -> Found:
    known = catalog.snapshots.get(name, version.number)
    return Found(version, known is not None and known.abandoned)


def from_memory(catalog: Catalog, name: ModelName, question: Question) -> Found | None:
    """A version that this process can tell of without its model's head: the newest one that it receives; or one that is visible and not durable
    yet, asked for by its number or as ``live``.

    What is durable may have been deleted since; and what is ``live`` is not known here of a model whose head nobody remembers.
    """
    if question.version == RECEIVING:
        receiving = _receiving(catalog, name)
        return receiving if isinstance(receiving, Found) else None
    if question.version == REF_LIVE and catalog.heads.last_read(name) is None:
        return None
    version = catalog.in_memory(name, question.version)
    return None if version is None or version.state.stored else _found(catalog, name, version)


def differs(before: Answer | None, after: Answer) -> bool:
    """Whether an answer says something else than the one before to anybody who waits: not how many bytes have come."""
    if isinstance(before, Found) and isinstance(after, Found):
        return (before.version.number, before.version.state, before.abandoned) != (
            after.version.number,
            after.version.state,
            after.abandoned,
        )
    return type(before) is not type(after)
