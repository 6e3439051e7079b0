"""Interface between an agent and an engine, and the state of an engine, derived from the statuses of its ranks.

An engine's driver makes the engine's own calls.
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
"""Policy for an update of an engine whose weights have no memory: the update waits for the wake-up, which applies it,
or the engine refuses it.
"""
StaleDrafter = Literal["refuse", "allow"]
ALLOW: StaleDrafter = "allow"
"""Policy for an update that leaves the drafter of an engine with speculative decoding behind."""
DIFFERENT = "different versions are served"
"""Prefix of ``broken`` if ranks or engines have different versions."""


def when_asleep_of(said: object) -> WhenAsleep:
    """Parse the user's setting for updates of a sleeping engine.

    Raises:
        InvalidArgument: the setting does not exist.
    """
    for known in (WAIT, REFUSE):
        if said == known:
            return known
    raise InvalidArgument(f"when_asleep cannot be {said!r}", fix=f"use {WAIT} or {REFUSE}")


def stale_drafter_of(said: object) -> StaleDrafter:
    """Parse the user's setting for updates that leave a drafter behind.

    Raises:
        InvalidArgument: the setting does not exist.
    """
    if said == REFUSE:
        return REFUSE
    if said == ALLOW:
        return ALLOW
    raise InvalidArgument(f"stale_drafter cannot be {said!r}", fix=f"use {REFUSE} or {ALLOW}")


class EngineFailed(WeighbridgeError):
    """The engine was unreachable, or did not do what was requested."""

    reason = "ENGINE_FAILED"


def attempt(step: Callable[[], T]) -> tuple[T | None, WeighbridgeError | None]:
    """Result of a step of an update, or the error that it raised.

    Errors that do not belong to this project are converted.
    """
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
    """A version on the engine's machine.

    Attributes:
        nbytes: bytes that all of the engine's ranks have fetched.
        seconds: from when the first of them began until the last one had them.
        early_seconds: how much of that had passed when the version was requested, because they began while it was still
            being received.
    """

    nbytes: int
    seconds: float
    early_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """State of an engine.

    Attributes:
        version: number of the version that all of its ranks report; None if they do not know, or report different
            versions.
        broken: why its parameters belong to no version; empty if they do.
        model: model of that version, as ``namespace/name``; empty if not known.
        instances: the starts of its ranks; empty for an engine that does not distinguish them.
        waiting: number of the version that the engine's wake-up will apply; None if there is none.
        stale: weights of the engine that do not belong to that version, such as a drafter's; empty if there are none.
        draft: the version of the drafter, such as ``acme/smol-eagle@5``, if it is a separate model from the service;
            otherwise empty.
        brought: number of versions that its ranks have received since they were started, all of them together; 0 for an
            engine that does not report it.
    """

    version: int | None
    broken: str = ""
    model: str = ""
    instances: tuple[str, ...] = field(default=(), compare=False)
    waiting: int | None = None
    stale: str = ""
    draft: str = ""
    brought: int = field(default=0, compare=False)


class EngineDriver(Protocol):
    """A running engine. Every method that fails raises `WeighbridgeError`: `EngineFailed`, or a more specific error."""

    def connect(self) -> None:
        """Give the engine its source of versions. May be called again, for instance after a restart of the engine."""

    def serving(self) -> Serving:
        """State of the engine."""

    def prepare(self, version: int) -> Prepared:
        """Make the engine fetch a version to its machine while it serves; returns when it has arrived."""

    def discard(self) -> None:
        """Release the prepared version."""

    def pause(self) -> None:
        """Stop the engine from computing until `resume`."""

    def apply(self, version: int, label: str) -> None:
        """Write the prepared version into the paused engine's parameters.

        Args:
            version: the prepared version.
            label: version label that the engine reports to its clients from now on.
        """

    def resume(self) -> None:
        """Resume the engine, with no cached results of other weights."""

    def label(self, label: str) -> None:
        """Set the label that the engine reports to its clients, after an agent determined the served version."""


@runtime_checkable
class PreparesEarly(Protocol):
    """Driver of an engine that stages a version while it arrives. Other engines stage it when it is ready."""

    def prepare_early(self, version: int) -> None:
        """Make the engine fetch a version as it arrives, while the service is still receiving it; returns immediately.

        `EngineDriver.prepare` continues with it when the version is ready.
        """


@runtime_checkable
class TakesDrafter(Protocol):
    """Driver of an engine whose drafter can be a separate model.

    Attributes:
        draft: the drafter's version that accompanies each version from now on, such as ``acme/smol-eagle@5``; empty to
            name none.
    """

    draft: str


@runtime_checkable
class GivesEvidence(Protocol):
    """Driver of an engine that provides evidence of its parameters."""

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence of the parameters of each rank, by the rank's name in errors, while the engine serves.

        Args:
            known: digests of recordings that need not be sent.
        """


@runtime_checkable
class AnswersToken(Protocol):
    """Driver of an engine that can generate one token on request."""

    def answer_token(self) -> None:
        """Make each engine behind the driver generate one token for a prompt; returns when all have responded.

        Raises:
            WeighbridgeError: an engine does not respond, is paused, or sleeps.
        """


Ranks = Mapping[str, Status]
"""Status of each rank of an engine, or of all engines behind one server, by the rank's name in errors."""


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
    """Refuse responses from ranks other than those that received the first request.

    Raises:
        FailedPrecondition: the engine was restarted in between, or several servers share one address.
    """
    if _instances(asked) != _instances(answered):
        raise FailedPrecondition(
            "the ranks that responded are not those that were asked to prepare",
            fix="if the engine was restarted, wait until it is up; if several servers share its "
            "address, as behind a router, run an agent for each "
            "server, with the server's own address",
        )


def wait_prepared(
    told: Ranks, ask: Callable[[], Ranks], model: str, number: int, timeout: float, draft: str = ""
) -> Prepared:
    """Wait until all ranks have a version in host memory.

    Args:
        told: the ranks' responses to the request to prepare.
        ask: returns the ranks' statuses.
        model: ``namespace/name``.
        number: the requested version.
        timeout: seconds.
        draft: the drafter's version to prepare with it; empty if none was named.

    Raises:
        FailedPrecondition: a rank cannot load the version, or its bytes did not arrive; states why. Or another version
            was requested meanwhile, or applied by a wake-up. Or the responses come from other ranks than those that
            received the request.
        DeadlineExceeded: the timeout has passed.
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
                f"{name} prepares {other}, not version {number}"
                if other
                else f"{name} no longer prepares version {number}",
                fix=(
                    "let only one agent update an engine; if the engine was asleep, its wake-up "
                    "comes first, and its log shows the version that this applied"
                ),
            )
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"version {number} was not prepared within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def _number(name: str, model: str) -> int | None:
    """Number of a version of this model; None for a version of another model."""
    of, _, number = policy_in(name).rpartition("@")
    return int(number) if of == model else None


def _instances(ranks: Ranks) -> tuple[str, ...]:
    return tuple(sorted(status.instance for status in ranks.values()))


def _by_version(ranks: Ranks) -> str:
    """Different versions that ranks serve, with the ranks of each."""
    names: dict[str, list[str]] = {}
    for name, status in ranks.items():
        names.setdefault(status.served or "no version", []).append(name)
    said = "; ".join(f"{served} by {' and '.join(there)}" for served, there in sorted(names.items()))
    return f"{DIFFERENT}: {said}"
