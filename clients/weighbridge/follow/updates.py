"""Update of running engines to one version: all prepare it while they serve, none is paused before the last one has it, and all go on in the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weighbridge.errors import WeighbridgeError
from weighbridge.follow.engines import Engine, EngineFailed, Prepared, Serving, attempt

T = TypeVar("T")
log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Updated:
    """An update of several engines.

    Attributes:
        nbytes: bytes that all of their ranks have fetched.
        prepare_seconds: until the last engine had them, while all served.
        pause_seconds: from asking the engines to pause until all went on.
    """

    nbytes: int
    prepare_seconds: float
    pause_seconds: float


def update(engines: Mapping[str, Engine], number: int, label: str) -> Updated:
    """Take engines to a version.

    Args:
        engines: by what errors call them.
        number: of the version; it has to be ready.
        label: what the engines shall tell their clients from then on.

    Raises:
        EngineFailed: one could not prepare the version, and none was paused; or one did not take it. That one keeps the version that it had, and
            goes on unless its weights are of no version.
    """
    drivers = list(engines.values())

    def prepare(engine: Engine) -> Prepared:
        engine.connect()
        return engine.prepare(number)

    started = time.monotonic()
    prepared = _all(partial(prepare, driver) for driver in drivers)
    ready = time.monotonic()
    if problems := _named(engines, _problems(prepared)):
        _all(driver.discard for driver in drivers)
        raise EngineFailed(
            f"not all engines can take version {number}; none was paused, and all keep what they have",
            details=problems,
        )
    ended = apply_prepared(drivers, number, label)
    seconds = time.monotonic() - ready
    if problems := _named(engines, ended):
        _all(driver.discard for driver, problem in zip(drivers, ended, strict=True) if problem)
        raise EngineFailed(f"not all engines have taken version {number}", details=problems)
    nbytes = sum(found.nbytes for found, _ in prepared if found is not None)
    return Updated(nbytes, ready - started, seconds)


def apply_prepared(engines: Sequence[Engine], number: int, label: str) -> list[str]:
    """Pause engines, bring what they have prepared to their parameters, and let them go on, whatever happens.

    If one cannot be paused, none gets the version. One that says that its parameters are of no version, or does not answer any more, stays paused.

    Args:
        engines: that have prepared the version. One alone is asked in the calling thread, so that signals interrupt it.
        number: of the version.
        label: what they shall tell their clients from then on.

    Returns:
        What went wrong, for each of them; empty if nothing did.
    """
    problems = ["interrupted"] * len(engines)  # until a step has ended: its half may be done
    try:
        ended = _problems(_all(engine.pause for engine in engines))
        if not any(ended):
            ended = _problems(_all(partial(engine.apply, number, label) for engine in engines))
        problems = ended
    finally:
        ends = _all(
            partial(_let_go_on, engine, failed=bool(problem))
            for engine, problem in zip(engines, problems, strict=True)
        )
    return [
        "\n".join(filter(None, (problem, end)))
        for problem, end in zip(problems, _problems(ends), strict=True)
    ]


def quietly(ask: Callable[[], T]) -> T | None:
    """What is answered, or None."""
    try:
        return ask()
    except WeighbridgeError as error:
        log.debug("while ending an update: %s", error)
        return None


def _let_go_on(engine: Engine, *, failed: bool) -> None:
    """Resume, unless weights may be mixed."""
    if failed:
        serving: Serving | None = None
        for again in (True, True, False):
            serving = quietly(engine.serving)
            if serving is not None or not again:
                break
            time.sleep(_ASK_AGAIN_SECONDS)
        if serving is None:
            raise EngineFailed("the engine does not say what it has, and was not told to go on")
        if serving.broken:
            return
    try:
        engine.resume()
    except WeighbridgeError as error:
        raise EngineFailed(f"it could not be told to go on: {error}") from error


def _all(steps: Iterable[Callable[[], T]]) -> list[tuple[T | None, WeighbridgeError | None]]:
    """Take steps, each of another engine, at once; one alone is taken in the calling thread."""
    waiting = list(steps)
    if len(waiting) <= 1:  # a signal has to interrupt it
        return list(map(attempt, waiting))
    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(attempt, waiting))


def _problems(ended: Iterable[tuple[object, WeighbridgeError | None]]) -> list[str]:
    return ["" if error is None else str(error) for _, error in ended]


def _named(engines: Mapping[str, Engine], problems: Sequence[str]) -> list[str]:
    return [f"{name}: {problem}" for name, problem in zip(engines, problems, strict=True) if problem]
