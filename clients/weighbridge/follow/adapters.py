"""Adapters of an engine's model: the driver interface for them, and the choice of adapters that an agent preloads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weighbridge._core.json_values import JsonValue
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import REF_LATEST, Model
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge.follow.updates import quietly

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient
    from weighbridge.follow.engines import Serving

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Pause between two checks of the service's adapters and the engine's state."""
_END_SECONDS = 2.0
_MOST_KNOWN = 4096
"""Number of versions whose base is cached."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter(JsonValue):
    """An adapter that an engine has.

    Attributes:
        name: its name in requests: ``acme/alice@18``.
        base: its base version, which the engine serves.
        nbytes: size of its tensors, or of its files if the engine fetched them.
        way: how it was transferred to the engine, ``tensors`` or ``files``; empty if the engine already had it.
    """

    name: str
    base: str
    nbytes: int
    way: str


@runtime_checkable
class TakesAdapters(Protocol):
    """Driver of an engine that loads adapters. Every method raises `WeighbridgeError` on failure."""

    def serving(self) -> Serving:
        """State of the engine, as from `Engine.serving`."""
        ...

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        """Make the engine load a version of an adapter."""
        ...

    def takes_adapters(self) -> bool:
        """Whether the engine accepts adapters now."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Adapters to preload.

    Attributes:
        pattern: pattern of their names, such as ``acme/*``.
        ref: the ref of each adapter.
    """

    pattern: str
    ref: str = REF_LATEST

    @staticmethod
    def read(text: str) -> Chosen:
        """Parse a choice that a user wrote: ``PATTERN`` or ``PATTERN@REF``. Raises InvalidArgument."""
        pattern, apart, ref = text.partition("@")
        if not pattern or (apart and not ref) or ref.isdecimal():
            raise InvalidArgument(f"{text!r} is not a pattern of adapters", fix="write 'acme/*', or 'acme/*@live'")
        return Chosen(pattern, ref or REF_LATEST)


def named_by(chosen: Sequence[Chosen], models: Sequence[Model]) -> dict[tuple[str, str], int]:
    """Numbers of the versions that the chosen refs currently name, by adapter and ref, in the order of the choices.

    Args:
        chosen: the user's choices.
        models: models of the service. The base version of an adapter's version is recorded only in that version.
    """
    return {
        (model.name, each.ref): model.refs[each.ref]
        for each in chosen
        for model in models
        if model.is_adapter and each.ref in model.refs and fnmatchcase(model.name, each.pattern)
    }


def due(
    wanted: Mapping[tuple[str, str], int], done: Mapping[tuple[str, str], int]
) -> Iterator[tuple[tuple[str, str], int]]:
    """Refs that have moved since they were last examined, with the versions that they name now. An adapter that the
    engine has since dropped is not loaded again, because the engine evicts adapters by their use.
    """
    for key, number in wanted.items():
        if done.get(key) != number:
            yield key, number


def _unloaded(before: Serving | None, now: Serving | None) -> bool:
    """Whether the engine has dropped all adapters between two checks: it was restarted, or received a version, even the
    same one, for example by a wake-up or by an update and its reversal.
    """
    if before is None or now is None:
        return True
    return (before.version, before.instances, before.brought) != (now.version, now.instances, now.brought)


class LoadsAhead:
    """Preloads adapters into an engine until closed, in parallel with the agent that updates its base.

    Each version is tried once for each base version that the engine serves; a request that names it tries again.
    Adapters of other base versions are skipped until the engine serves theirs.

    Args:
        client: of the service.
        model: the base model, ``namespace/name``.
        engine: the engine.
        chosen: which adapters.
        say: called with one line for each adapter that was loaded or failed to load.
        every: seconds between two checks.
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        engine: TakesAdapters,
        chosen: Sequence[Chosen],
        say: Callable[[str], object],
        every: float = LOOK_SECONDS,
    ) -> None:
        self._client = client
        self._model = model
        self._engine = engine
        self._chosen = chosen
        self._say = say
        self._every = every
        self._seen: Serving | None = None
        self._done: dict[tuple[str, str], int] = {}
        self._bases: dict[tuple[str, int], BaseVersion | None] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapters-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop loading."""
        self._ended.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except WeighbridgeError as error:  # the agent reports that the service is unreachable
                log.debug("no adapters were loaded ahead: %s", error)
            if self._ended.wait(self._every):
                return

    def _look(self) -> None:
        """Load adapters that are due. Raises WeighbridgeError if the service is unreachable."""
        before, self._seen = self._seen, quietly(self._engine.serving)
        if _unloaded(before, self._seen):
            self._done.clear()
        if self._seen is None or self._seen.version is None:
            return
        wanted = named_by(self._chosen, self._client.models())
        now = list(due(wanted, self._done))
        if not (now and self._engine.takes_adapters()):  # the next check loads them
            return
        for (adapter, ref), number in now:
            if self._ended.is_set():
                return
            self._done[adapter, ref] = number
            self._load(adapter, number, f"{self._model}@{self._seen.version}")

    def _load(self, adapter: str, number: int, served: str) -> None:
        try:
            if str(self._base_of(adapter, number)) != served:
                return
            found = self._engine.load_adapter(self._client, adapter, number)
        except WeighbridgeError as error:
            self._say(f"{adapter}@{number}: not loaded ahead: {error}")
            return
        if found.way:
            self._say(f"{found.name}: loaded ahead, on {found.base}")

    def _base_of(self, adapter: str, number: int) -> BaseVersion | None:
        key = adapter, number
        if key not in self._bases:
            self._bases[key] = self._client.version(adapter, number).base
            while len(self._bases) > _MOST_KNOWN:
                del self._bases[next(iter(self._bases))]
        return self._bases[key]
