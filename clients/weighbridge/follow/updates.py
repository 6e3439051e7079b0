"""Update of running engines to one version: all prepare it while they serve, none is paused before the last one has it,
and all resume afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from opentelemetry.trace import INVALID_SPAN, Span

from weighbridge._core.engines.step_parts import OF_AGENT, Parts
from weighbridge._tracing import spans
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.engines import EngineDriver, EngineFailed, Prepared, Serving, attempt

T = TypeVar("T")
log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Updated:
    """An update of several engines.

    Attributes:
        nbytes: bytes that all of their ranks have fetched.
        prepare_seconds: time until the last engine had them, while all served.
        pause_seconds: time from the request to pause until all resumed.
        parts: parts of both, as in `step_parts.OF_AGENT`.
    """

    nbytes: int
    prepare_seconds: float
    pause_seconds: float
    parts: Parts = field(default_factory=dict, hash=False)


class Laps:
    """Measures the parts of an update with a monotonic clock. Each part begins when the previous one ends.

    Args:
        span: span of the update; each `part` is a child span.

    Attributes:
        parts: durations of ended parts, in seconds.
    """

    def __init__(self, span: Span = INVALID_SPAN) -> None:
        self.parts: dict[str, float] = {}
        self._span = span
        self._began_s = self._last_s = time.monotonic()

    @property
    def ended_s(self) -> float:
        """When the last part ended, by `time.monotonic`."""
        return self._last_s

    def heard(self, at_s: float) -> None:
        """Record when the agent learned of the version, by `time.monotonic`."""
        self.parts["wait"] = self._began_s - at_s

    def end(self, name: str) -> None:
        """End a part; the next one begins."""
        now_s = time.monotonic()
        self.parts[name], self._last_s = now_s - self._last_s, now_s

    def end_preparation(self, staged_seconds: float, early_seconds: float = 0.0) -> None:
        """End ``stage`` and ``agree``.

        Args:
            staged_seconds: time until the last rank had the version, as reported by the ranks.
            early_seconds: how much of that had passed when this part began. The engine's wait was shorter by this
                amount.
        """
        self.end("stage")
        took_s = self.parts["stage"]
        if "wait" in self.parts:
            self.parts["wait"] -= early_seconds
            took_s += early_seconds
        else:
            staged_seconds -= early_seconds
        self.parts["stage"] = min(max(staged_seconds, 0.0), took_s)
        self.parts["agree"] = took_s - self.parts["stage"]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that ends with the block, also on failure."""
        try:
            with spans.child(self._span, f"weighbridge.{name}"):
                yield
        finally:
            self.end(name)


def update(engines: Mapping[str, EngineDriver], number: int, label: str) -> Updated:
    """Update engines to a version.

    Args:
        engines: engines by their names in errors.
        number: number of the version, which must be ready.
        label: version label that the engines report to their clients from then on.

    Raises:
        EngineFailed: an engine could not prepare the version, and none was paused; or an engine did not apply it. That
            engine keeps its previous version, and resumes unless its weights belong to no version.
    """
    drivers = list(engines.values())

    def prepare(engine: EngineDriver) -> Prepared:
        engine.connect()
        return engine.prepare(number)

    laps = Laps()
    prepared = _all(partial(prepare, driver) for driver in drivers)
    laps.end_preparation(max((found.seconds for found, _ in prepared if found is not None), default=0.0))
    if problems := _named(engines, _problems(prepared)):
        _all(driver.discard for driver in drivers)
        raise EngineFailed(
            f"not all engines can apply version {number}; none was paused, and all keep their current version",
            details=problems,
        )
    ended = apply_prepared(drivers, number, label, laps)
    if problems := _named(engines, ended):
        _all(driver.discard for driver, problem in zip(drivers, ended, strict=True) if problem)
        raise EngineFailed(f"not all engines have applied version {number}", details=problems)
    nbytes = sum(found.nbytes for found, _ in prepared if found is not None)
    parts = laps.parts
    return Updated(nbytes, parts["stage"] + parts["agree"], pause_seconds(parts), parts)


def pause_seconds(parts: Parts) -> float:
    """Time from the request to pause until the engines resumed."""
    return sum(parts.get(each.name, 0.0) for each in OF_AGENT if each.still)


def apply_prepared(engines: Sequence[EngineDriver], number: int, label: str, laps: Laps | None = None) -> list[str]:
    """Pause engines, apply their prepared versions, and always resume them.

    If one cannot be paused, none applies the version. An engine stays paused if it reports that its parameters belong
    to no version, or if it no longer responds.

    Args:
        engines: engines that have prepared the version. A single engine is called in the calling thread, so that
            signals interrupt it.
        number: number of the version.
        label: version label that they report to their clients from then on.
        laps: measures the parts; ``apply`` is missing if it was not requested.

    Returns:
        The failure of each engine; empty on success.
    """
    laps = laps or Laps()
    problems = ["interrupted"] * len(engines)  # until a step has ended: it may be half done
    try:
        with laps.part("pause"):
            ended = _problems(_all(engine.pause for engine in engines))
        if not any(ended):
            with laps.part("apply"):
                ended = _problems(_all(partial(engine.apply, number, label) for engine in engines))
        problems = ended
    finally:
        with laps.part("resume"):
            ends = _all(
                partial(let_go_on, engine, failed=bool(problem))
                for engine, problem in zip(engines, problems, strict=True)
            )
    return ["\n".join(filter(None, (problem, end))) for problem, end in zip(problems, _problems(ends), strict=True)]


def quietly(ask: Callable[[], T]) -> T | None:
    """Result of a call; None if it raises `WeighbridgeError`."""
    try:
        return ask()
    except WeighbridgeError as error:
        log.debug("while ending an update: %s", error)
        return None


def let_go_on(engine: EngineDriver, *, failed: bool) -> None:
    """Resume the engine, unless its weights may be mixed."""
    if failed:
        serving: Serving | None = None
        for again in (True, True, False):
            serving = quietly(engine.serving)
            if serving is not None or not again:
                break
            time.sleep(_ASK_AGAIN_SECONDS)
        if serving is None:
            raise EngineFailed("the engine does not report its version, and was not resumed")
        if serving.broken:
            return
    try:
        engine.resume()
    except WeighbridgeError as error:
        raise EngineFailed(f"it could not be resumed: {error}") from error


def _all(steps: Iterable[Callable[[], T]]) -> list[tuple[T | None, WeighbridgeError | None]]:
    """Run steps of different engines concurrently; a single step runs in the calling thread."""
    waiting = list(steps)
    if len(waiting) <= 1:  # a signal must be able to interrupt it
        return list(map(attempt, waiting))
    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(attempt, waiting))


def _problems(ended: Iterable[tuple[object, WeighbridgeError | None]]) -> list[str]:
    return ["" if error is None else str(error) for _, error in ended]


def _named(engines: Mapping[str, EngineDriver], problems: Sequence[str]) -> list[str]:
    return [f"{name}: {problem}" for name, problem in zip(engines, problems, strict=True) if problem]
