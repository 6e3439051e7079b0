"""Adapters of one API server: before a request reaches vLLM, its name is resolved to one version, and every engine
behind the server loads that version.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from safetensors import safe_open

from weighbridge._clients.client import manifest_of
from weighbridge._clients.engine import EngineClient
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.resources import Version
from weighbridge._lazy.caching import cache_folder
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from weighbridge.integrations.vllm_adapters.guard import LOAD, NAMES, STATE, UNLOAD
from weighbridge.integrations.vllm_adapters.names import AdapterVersion, Order, asked, is_number, numbers
from weighbridge.integrations.vllm_adapters.serving import (
    LORA_CONFIG,
    BaseNow,
    EngineState,
    base_problem,
    config_problems,
    tensor_problems,
    together,
)
from weighbridge.integrations.vllm_adapters.settings import AdapterSettings
from weighbridge.integrations.vllm_adapters.store import FolderHold, Store

log = logging.getLogger(f"vllm.plugins.{__name__}")
T = TypeVar("T")
_THREADS = 8
"""Maximum number of concurrent calls to the service; each blocks a thread."""
_MOST_UNKNOWN = 1024
_TENSORS = "adapter_model.safetensors"


@dataclass
class Loaded:
    """A version that all engines have loaded once. They load it again from its folder when they need it.

    Attributes:
        version: which one.
        order: the order with which they load it.
        hold: its folder.
        requests: number of requests that currently use it.
    """

    version: AdapterVersion
    order: Order
    hold: FolderHold
    requests: int = 0


@dataclass
class Unknown:
    """Names that the service does not know, each with the error and the time before which it is not queried again."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _found: OrderedDict[str, tuple[float, NotFound]] = field(default_factory=OrderedDict)

    def check(self, name: str) -> None:
        """Raise the recorded error if the name did not exist a short time ago."""
        until, error = self._found.get(name, (0.0, None))
        if error is not None and self.clock() < until:
            raise NotFound(error.message, fix=error.fix)
        self._found.pop(name, None)

    def note(self, name: str, error: NotFound) -> None:
        """Record a name that does not exist."""
        self._found[name] = self.clock() + self.seconds, error
        while len(self._found) > _MOST_UNKNOWN:
            self._found.popitem(last=False)


class Admission:
    """Adapters that an API server serves.

    Args:
        settings: which adapters.
        client: vLLM's client of the engines (``engine_client``).
        models: vLLM's table of served models (``openai_serving_models``); adapters are added to its ``lora_requests``.
        request_of: converts an order to vLLM's request type.
    """

    def __init__(self, settings: AdapterSettings, client: Any, models: Any, request_of: Callable[[Order], Any]) -> None:
        config = client.vllm_config
        if config.lora_config is None:
            raise FailedPrecondition("this engine serves no adapters", fix="start it with --enable-lora")
        self.settings = settings.within(
            str(config.load_config.load_format), config.load_config.model_loader_extra_config or {}
        )
        self._engines = client.engine_core
        self._models = models
        self._request_of = request_of
        self._service = EngineClient(
            self.settings.server, lane=self.settings.lane, retry_seconds=self.settings.retry_seconds
        )
        self._store = Store(cache_folder(), settings.keep_versions, settings.keep_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "weighbridge-adapters")
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unknown = Unknown(settings.unknown_seconds)
        self._state: EngineState | None = None
        self._base: BaseNow | None = None

    def names_adapter(self, name: object) -> Reference | None:
        """Model and version that the model of a request names, if it is one of these adapters.

        None for any other name, which vLLM handles.
        """
        found = asked(name) if isinstance(name, str) else None
        if found is None or not self.settings.serves(found.model) or self._models.is_base_model(name):
            return None
        known = self._models.lora_requests
        return None if name in known and name not in self._loaded else found

    @asynccontextmanager
    async def serving(self, named: Reference) -> AsyncIterator[Loaded]:
        """A version that all engines can use, held while a request is processed.

        Args:
            named: model, and a number or a ref; a ref is resolved now.

        Raises:
            NotFound: the service does not know it.
            InvalidArgument: it is not an adapter, or the engines cannot serve it; states why, and what they support.
            FailedPrecondition: its base is not the version that the engines have; names both.
            Unavailable: the service is unreachable.
        """
        name = f"{named.model}@{named.version}"
        version = None
        if not is_number(named.version):
            version = await self._find(name)
            name = f"{version.model}@{version.number}"
        found = await self._have(name, version)
        try:
            yield found
        finally:
            found.requests -= 1

    async def load_ahead(self, named: Reference) -> tuple[Loaded, bool]:
        """Load a version into the memory of all engines, even if they dropped it since a request named it. Returns the
        version, and whether they already had it.

        Args, Raises: as `serving`.
        """
        before = await self.in_memory()
        async with self.serving(named) as found:
            name = found.version.name
            if name not in before and name not in await self.in_memory():
                await self._order(found.version, found.hold)
            return found, name in before

    async def unload(self, named: Reference) -> tuple[str, bool]:
        """Make all engines drop a version from memory. Returns its name, and whether any engine had it.

        A request that names it loads it again.

        Raises:
            NotFound: the service does not know the ref.
        """
        name = f"{named.model}@{named.version}"
        if not is_number(named.version):
            version = await self._find(name)
            name = f"{version.model}@{version.number}"
        async with self._turn(name):
            had = await self._ask_engines(UNLOAD, name)
            found = self._loaded.get(name)
            if found is not None and not found.requests:
                self._forget(name)
        return name, any(had)

    async def in_memory(self) -> frozenset[str]:
        """Names of the versions that all engines have in memory, including those that other API servers loaded."""
        first, *others = [frozenset(each) for each in await self._ask_engines(NAMES)]
        return first.intersection(*others)

    async def base_changed(self, loaded: Loaded) -> str:
        """Reason why engines refused an adapter that they had accepted before; empty if the reason was not its base."""
        return base_problem(loaded.version.name, loaded.version.base, await self.engine_state())

    async def engine_state(self) -> EngineState:
        """State of the engines, as they report it now.

        Raises:
            FailedPrecondition: the engines do not guard adapters.
        """
        found = await self._ask_engines(STATE)
        self._state = together([EngineState.of(each) for each in found])
        return self._state

    async def _have(self, name: str, version: Version | None) -> Loaded:
        """A loaded version, with its request count increased by one."""
        async with self._turn(name):
            found = self._loaded.get(name)
            if found is None:
                found = await self._load(name, version)
            elif self._state is None or base_problem(name, found.version.base, self._state):
                self._check_base(found.version, await self.engine_state())
            self._loaded[name] = found
            self._loaded.move_to_end(name)
            found.requests += 1
        self._forget_oldest()
        return found

    def _turn(self, name: str) -> asyncio.Lock:
        """Lock of a version, so that concurrent requests load it only once."""
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = asyncio.Lock()
        return turn

    async def _load(self, name: str, version: Version | None) -> Loaded:
        begun = time.monotonic()
        version = version or await self._find(name)
        found = AdapterVersion.of(version)
        if found is None:
            raise InvalidArgument(f"{name} is a whole model, not an adapter", fix="ask an engine that serves it")
        state, now, files = await asyncio.gather(
            self.engine_state(),
            self._base_now(found.base),
            self._call(self._service.model_files, *_apart(name)),
        )
        self._check_base(found, state, now)
        _check_servable(name, config_problems(json.loads(files[LORA_CONFIG]), state), state)
        fetching = time.monotonic()
        hold = await self._call(self._store.hold, found.key, partial(self._service.export, *_apart(name)))
        try:
            with safe_open(hold.folder / _TENSORS, "pt") as file:
                _check_servable(name, tensor_problems(file.keys(), state.modules), state)
            loading = time.monotonic()
            order = await self._order(found, hold)
        except BaseException:
            hold.release()
            raise
        loaded = Loaded(found, order, hold)
        self._models.lora_requests[name] = self._request_of(order)
        ended = time.monotonic()
        log.info(
            "%s is loaded: asked in %.0f ms, %.1f MB fetched in %.0f ms, loaded in %.0f ms",
            name, 1e3 * (fetching - begun), hold.nbytes / 1e6, 1e3 * (loading - fetching), 1e3 * (ended - loading),
        )  # fmt: skip
        return loaded

    async def _order(self, version: AdapterVersion, hold: FolderHold) -> Order:
        """Load an adapter in all engines, under the first of its numbers that no other adapter uses in any of them.

        Returns the order.
        """
        for number in numbers(version.name):
            order = Order(
                version.name, number, str(hold.folder), version.base, self.settings.server, self.settings.lane
            )
            answers = await self._ask_engines(LOAD, asdict(order))
            if any(each["taken"] for each in answers):
                continue
            for each in answers:
                if each["asleep"]:
                    raise FailedPrecondition(each["asleep"], fix="wake it up: POST /wake_up")
                if each["base"]:
                    raise FailedPrecondition(each["base"])
                if each["failed"]:
                    raise InvalidArgument(f"vLLM cannot load {version.name}: {each['failed']}")
            return order
        raise AssertionError("numbers end")

    async def _ask_engines(self, method: str, *args: Any) -> list[Any]:
        engines = self._engines
        try:
            return list(
                await asyncio.gather(
                    *(engines._call_utility_async(method, *args, engine=each) for each in engines.core_engines)
                )
            )
        except Exception as error:
            raise FailedPrecondition(
                f"an engine did not answer a call about adapters: {error}",
                fix=(
                    "set WEIGHBRIDGE_ADAPTERS in the environment of all engines, too, and serve adapters with vLLM 0.32"
                ),
            ) from error

    def _check_base(self, version: AdapterVersion, state: EngineState, now: BaseNow | None = None) -> None:
        if problem := base_problem(version.name, version.base, state, now, version.base_digest):
            raise FailedPrecondition(
                problem,
                fix=(
                    f"ask for a version of {version.reference.model} on the engine's version, or "
                    f"an engine that serves {version.base}"
                ),
            )

    async def _find(self, name: str) -> Version:
        self._unknown.check(name)
        try:
            return await self._call(self._service.version, name)
        except NotFound as error:
            self._unknown.note(name, error)
            raise

    async def _base_now(self, base: str) -> BaseNow | None:
        """The version that has this name now; None if it no longer exists, or this engine may not see it."""
        try:
            there = await self._call(self._service.version, base)
            found = BaseNow(base, there.create_time_ms)
            known = self._base
            if known is not None and (known.name, known.created_ms) == (found.name, found.created_ms):
                return known
            if there.state.stored and not there.error:
                manifest = await self._call(manifest_of, self._service, *_apart(base))
                found = self._base = replace(found, digest=manifest.digest)
        except (NotFound, PermissionDenied):
            return None
        return found

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def _forget_oldest(self) -> None:
        """Drop versions that exceed the limits and that no request uses, and remove folders that exceed the limits of
        this host.
        """
        over = len(self._loaded) - self.settings.keep_versions
        nbytes = sum(each.hold.nbytes for each in self._loaded.values())
        if over <= 0 and nbytes <= self.settings.keep_bytes:
            return
        for name, each in list(self._loaded.items()):
            if over <= 0 and nbytes <= self.settings.keep_bytes:
                break
            if not each.requests:
                self._forget(name)
                over, nbytes = over - 1, nbytes - each.hold.nbytes
        self._threads.submit(self._store.prune)

    def _forget(self, name: str) -> None:
        """Drop a version that no request uses."""
        found = self._loaded.pop(name)
        self._models.lora_requests.pop(name, None)
        found.hold.release()


def _apart(name: str) -> tuple[str, int]:
    found = parse_reference(name)
    return found.model, found.number


def _check_servable(name: str, problems: list[str], state: EngineState) -> None:
    if problems:
        raise InvalidArgument(
            f"vLLM cannot serve {name}: {'; '.join(problems)}",
            fix=f"{state.can}; or push the merged model under a name of its own (docs/recipes/lora.md)",
        )
