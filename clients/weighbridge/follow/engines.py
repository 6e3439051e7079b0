"""Interface between an agent and an engine, and the state of an engine by the statuses of its ranks.

An engine's own calls are its driver's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from weighbridge.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.follow.evidence import Evidence
from weighbridge.follow.status import Status, drafter_in, is_version, label, policy_in

T = TypeVar("T")
log = logging.getLogger(__name__)

_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.005, 0.1
WhenAsleep = Literal["wait", "refuse"]
WAIT: WhenAsleep = "wait"
REFUSE: Literal["refuse"] = "refuse"
"""Policy for an update of an engine whose weights have no memory: the update waits for the wake-up, which applies it, or is refused."""
StaleDrafter = Literal["refuse", "allow"]
ALLOW: StaleDrafter = "allow"
"""Policy for an update that leaves the drafter of an engine behind, which decodes speculatively."""
DIFFERENT = "different versions are served"
"""Beginning of what is broken where ranks or engines have different versions."""


def when_asleep_of(said: object) -> WhenAsleep:
    """Setting for updates of an engine that sleeps, from a user's text.

    Raises:
        InvalidArgument: there is no such setting.
    """
    for known in (WAIT, REFUSE):
        if said == known:
            return known
    raise InvalidArgument(f"when_asleep is {said!r}", fix=f"use {WAIT} or {REFUSE}")


def stale_drafter_of(said: object) -> StaleDrafter:
    """Setting for updates that leave a drafter behind, from a user's text.

    Raises:
        InvalidArgument: there is no such setting.
    """
    if said == REFUSE:
        return REFUSE
    if said == ALLOW:
        return ALLOW
    raise InvalidArgument(f"stale_drafter is {said!r}", fix=f"use {REFUSE} or {ALLOW}")


class EngineFailed(WeighbridgeError):
    """The engine could not be reached, or did not do what it was asked for."""

    reason = "ENGINE_FAILED"


def attempt(step: Callable[[], T]) -> tuple[T | None, WeighbridgeError | None]:
    """Result of a step of an update, or the error that it raised; an error of another kind is replaced by one of this project."""
    try:
        return step(), None
    except WeighbridgeError as error:
        return None, error
    except Exception as error:  # any: the other ranks or engines wait for the outcome
        log.exception("a step of an update failed")
        told = FailedPrecondition(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        return None, told


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that lies on the engine's machine.

    Attributes:
        nbytes: bytes that all of the engine's ranks have fetched.
        seconds: from when the first of them began until the last one had them.
        early_seconds: how much of that had passed when they were asked for the version: they had begun while it was still being received.
    """

    nbytes: int
    seconds: float
    early_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """State of an engine.

    Attributes:
        version: number of the version that all of its ranks say they serve; None if they do not know, or say different things.
        broken: why its parameters are of no version; empty if they are.
        model: of which model that version is, as ``namespace/name``; empty if they do not know.
        instances: the starts of its ranks; empty for an engine that does not distinguish them.
        waiting: number of the version that the engine's wake-up will bring; None if there is none.
        stale: weights of the engine that are not of that version, as a drafter's; empty if there are none.
        draft: the version of the drafter, if that is a model of its own which the engine has from the service, as ``acme/smol-eagle@5``; empty without.
        brought: number of versions that its ranks have received since they were started, all of them together; 0 for an engine that
            does not report it.
    """

    version: int | None
    broken: str = ""
    model: str = ""
    instances: tuple[str, ...] = field(default=(), compare=False)
    waiting: int | None = None
    stale: str = ""
    draft: str = ""
    brought: int = field(default=0, compare=False)


class Engine(Protocol):
    """A running engine. Every method that fails raises `WeighbridgeError`: `EngineFailed`, or a more specific error."""

    def connect(self) -> None:
        """Give the engine its source of versions. May be called again, for instance when the engine has been started again."""

    def serving(self) -> Serving:
        """State of the engine."""

    def prepare(self, version: int) -> Prepared:
        """Have a version brought to the engine's machine while it serves; returns when it is there."""

    def discard(self) -> None:
        """Give back what was prepared."""

    def pause(self) -> None:
        """Let the engine compute nothing until `resume`."""

    def apply(self, version: int, label: str) -> None:
        """Bring what was prepared to the paused engine's parameters.

        Args:
            version: that was prepared.
            label: label of the version that the engine gives its clients from now on.
        """

    def resume(self) -> None:
        """Let the engine go on, with nothing cached of other weights."""

    def label(self, label: str) -> None:
        """Set the label that the engine gives its clients, where an agent has found out which version it serves."""


@runtime_checkable
class PreparesEarly(Protocol):
    """Driver of an engine that stages a version while it arrives. An `Engine` without this stages it when it is ready."""

    def prepare_early(self, version: int) -> None:
        """Have a version that is still being received brought to the engine's machine as it arrives; returns at once. `Engine.prepare` goes on with it
        when the version is ready."""


@runtime_checkable
class TakesDrafter(Protocol):
    """Driver of an engine whose drafter can be a model of its own.

    Attributes:
        draft: the drafter's version that the engine is to have with each version from now on, as ``acme/smol-eagle@5``; empty to name none.
    """

    draft: str


@runtime_checkable
class GivesEvidence(Protocol):
    """Driver of an engine whose parameters can be proved."""

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence of what each rank computes with, by what errors call it, while the engine serves.

        Args:
            known: digests of recordings that need not be sent.
        """


@runtime_checkable
class AnswersToken(Protocol):
    """Driver of an engine that can be asked for one token."""

    def answer_token(self) -> None:
        """Have each engine behind the driver answer one token of a prompt that it computes; returns when all have.

        Raises:
            WeighbridgeError: an engine does not answer, is paused, or sleeps.
        """


Ranks = Mapping[str, Status]
"""Status of each rank of an engine, of all engines behind one server, by what errors call the rank."""


def serving_of(ranks: Ranks, model: str) -> Serving:
    """State of an engine, from the statuses of its ranks."""
    found = {status.served for status in ranks.values()}
    broken = next((status.broken for status in ranks.values() if status.broken), "")
    waiting = next((_number(status.waiting, model) for status in ranks.values() if status.waiting), None)
    instances = _instances(ranks)
    if len(found) != 1:
        problem = "\n".join(filter(None, (broken, _by_version(ranks))))
        return Serving(None, problem, instances=instances, waiting=waiting)
    served = found.pop()
    stale = next((status.stale for status in ranks.values() if status.stale), "")
    of = policy_in(served).rpartition("@")[0]
    brought = sum(status.brought for status in ranks.values())
    return Serving(_number(served, model), broken, of, instances, waiting, stale, drafter_in(served), brought)


def check_same_ranks(asked: Ranks, answered: Ranks) -> None:
    """Refuse answers of other ranks than those that were asked first.

    Raises:
        FailedPrecondition: the engine was started again in between, or several servers answer by one address.
    """
    if _instances(asked) != _instances(answered):
        raise FailedPrecondition(
            "other ranks answer than those that were asked to prepare",
            fix="if the engine was started again, wait until it is up; if its address is that of several servers, such as a router's, name each "
            "server's own, with an agent beside each",
        )


def wait_prepared(
    told: Ranks, ask: Callable[[], Ranks], model: str, number: int, timeout: float, draft: str = ""
) -> Prepared:
    """Wait until all ranks have a version in host memory.

    Args:
        told: the ranks' answers to the request to prepare.
        ask: the ranks' statuses.
        model: ``namespace/name``.
        number: the version that they are to prepare.
        timeout: seconds.
        draft: the version of the drafter that they are to prepare with it; empty if none was named.

    Raises:
        FailedPrecondition: a rank cannot take it, or its bytes did not come; says why. Another version was requested meanwhile, or
            brought by a wake-up. Or other ranks answer than those that got the request.
        DeadlineExceeded: not in time.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_POLL_SECONDS
    wanted = label(model, number, draft)
    while True:
        named = ask()
        check_same_ranks(told, named)
        ranks = list(named.values())
        problems = [f"{name}: {rank.error}" for name, rank in named.items() if rank.error]
        if problems:
            raise FailedPrecondition(f"version {number} could not be prepared", details=problems)
        if all(is_version(rank.prepared, wanted) for rank in ranks):
            early_s = max(rank.early_seconds for rank in ranks)
            late_s = max(rank.seconds - rank.early_seconds for rank in ranks)
            return Prepared(sum(rank.nbytes for rank in ranks), early_s + late_s, early_s)
        for name, rank in named.items():
            if any(is_version(each, wanted) for each in (rank.preparing, rank.prepared)):
                continue
            other = rank.preparing or rank.prepared
            raise FailedPrecondition(
                f"{name} prepares {other}, and not version {number}"
                if other
                else f"{name} does not prepare version {number} any more",
                fix="let one agent update an engine; if it has slept, its wake-up comes first, and its log says what that has brought",
            )
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"version {number} was not prepared within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def _number(name: str, model: str) -> int | None:
    """Number of a version of this model; None for another one's."""
    of, _, number = policy_in(name).rpartition("@")
    return int(number) if of == model else None


def _instances(ranks: Ranks) -> tuple[str, ...]:
    return tuple(sorted(status.instance for status in ranks.values()))


def _by_version(ranks: Ranks) -> str:
    """Versions that ranks serve, where they differ, with the ranks of each."""
    names: dict[str, list[str]] = {}
    for name, status in ranks.items():
        names.setdefault(status.served or "no version", []).append(name)
    said = "; ".join(f"{served} by {' and '.join(there)}" for served, there in sorted(names.items()))
    return f"{DIFFERENT}: {said}"
