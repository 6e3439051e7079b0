"""Adapters beside an engine's model: what drivers do with them, and which of them an agent has loaded before a request names them."""

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
"""Pause between two looks at the service's adapters, and at the engine's state."""
_END_SECONDS = 2.0
_MOST_KNOWN = 4096
"""Versions whose base is remembered."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter(JsonValue):
    """An adapter that an engine has.

    Attributes:
        name: what requests call it: ``acme/alice@18``.
        base: the version that it is on and that the engine serves.
        nbytes: of its tensors, or of its files where the engine has fetched them.
        way: how it came to the engine now, ``tensors`` or ``files``; empty if the engine had it already.
    """

    name: str
    base: str
    nbytes: int
    way: str


@runtime_checkable
class TakesAdapters(Protocol):
    """Driver of an engine that loads adapters beside its model. Every method raises `WeighbridgeError` if it cannot do what it should."""

    def serving(self) -> Serving:
        """State of the engine, as `Engine.serving` gives it."""
        ...

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        """Have the engine load a version of an adapter."""
        ...

    def takes_adapters(self) -> bool:
        """Whether the engine loads any now."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Adapters that are to be loaded ahead.

    Attributes:
        pattern: of their names, such as ``acme/*``.
        ref: which ref of each.
    """

    pattern: str
    ref: str = REF_LATEST

    @staticmethod
    def read(text: str) -> Chosen:
        """A choice as a user has written it: ``PATTERN`` or ``PATTERN@REF``. Raises InvalidArgument."""
        pattern, apart, ref = text.partition("@")
        if not pattern or (apart and not ref) or ref.isdecimal():
            raise InvalidArgument(f"{text!r} names no adapters", fix="write 'acme/*', or 'acme/*@live'")
        return Chosen(pattern, ref or REF_LATEST)


def named_by(chosen: Sequence[Chosen], models: Sequence[Model]) -> dict[tuple[str, str], int]:
    """Numbers of the versions that the chosen refs name now, by adapter and ref; in the order of the choices.

    Args:
        chosen: by a user.
        models: of the service. Which version of a base an adapter's version is on, only that version says.
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
    """Refs that have moved since they were last examined, with the versions that they name now. An adapter that the engine has dropped
    since is not loaded again: the engine decides by their use which adapters stay.
    """
    for key, number in wanted.items():
        if done.get(key) != number:
            yield key, number


def _unloaded(before: Serving | None, now: Serving | None) -> bool:
    """Whether the engine has dropped all adapters between two looks: it was started again, or has received a version, even the one that
    it had, as by a wake-up or by an update there and back.
    """
    if before is None or now is None:
        return True
    return (before.version, before.instances, before.brought) != (now.version, now.instances, now.brought)


class LoadsAhead:
    """Loads adapters into an engine before a request names them, beside the agent that takes it to versions of its base; until it is closed.

    Each version is tried once on each version of the base that the engine serves: a request that names it tries again. Adapters on other versions of the base
    are skipped until the engine serves theirs.

    Args:
        client: of the service.
        model: of the base, ``namespace/name``.
        engine: the engine.
        chosen: which adapters.
        say: receives one line for each adapter that was loaded, or that could not be.
        every: seconds between two looks.
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
        """Load no more."""
        self._ended.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except WeighbridgeError as error:  # the agent says that the service cannot be reached
                log.debug("no adapters were loaded ahead: %s", error)
            if self._ended.wait(self._every):
                return

    def _look(self) -> None:
        """Load what is due now. Raises WeighbridgeError if the service cannot be asked."""
        before, self._seen = self._seen, quietly(self._engine.serving)
        if _unloaded(before, self._seen):
            self._done.clear()
        if self._seen is None or self._seen.version is None:
            return
        wanted = named_by(self._chosen, self._client.models())
        now = list(due(wanted, self._done))
        if not (now and self._engine.takes_adapters()):  # the next look loads them
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
