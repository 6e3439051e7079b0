"""Engines behind one API server of vLLM: a call about weights reaches all of them, all respond, and either all or none
update to a version.

With data parallelism vLLM calls all engines, returns the first one's response, and does not roll back engines that
succeeded if others failed. Each API server runs this code, because each reaches all engines. It requires only vLLM's
client of engines, as `EnginesClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.vllm import NAME

_WORKERS = "weighbridge_"
"""Prefix of the names of methods of `weighbridge.integrations.vllm.worker`."""
_APPLY, _UNDO = _WORKERS + "apply", _WORKERS + "undo"
_TRANSFER = "update_weights"
"""vLLM's worker method that receives weights through the transfer engine."""
STAGE, APPLY, UNDO, DISCARD = "stage", "apply", "undo", "discard"
"""Phases of an update of several engines: names of worker methods without the prefix `_WORKERS`, and phases of the
transfer engine.
"""

Problems = dict[int, str]
"""Failure of each engine; empty on success."""
Ask = Callable[[Sequence[int], str], Awaitable[Problems]]
"""Runs a phase on some engines concurrently, and returns each one's problem when all have ended."""


class EnginesClient(Protocol):
    """Part of vLLM's ``AsyncMPClient`` that is used."""

    vllm_config: Any
    core_engines: Sequence[bytes]

    def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class WorkersCall:
    """A call of a method on all workers, by the names of the arguments of vLLM's ``collective_rpc_async``."""

    method: Any
    timeout: float | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


async def collective_rpc(original: Callable[..., Awaitable[Any]], client: EnginesClient, call: WorkersCall) -> Any:
    """Make a call as vLLM does. If the call concerns weights of several engines, all of them respond.

    Args:
        original: vLLM's function for it.
        client: client of all engines behind this API server.
        call: the call.

    Raises:
        FailedPrecondition: vLLM's own update did not reach all engines; states which engine has which version.
    """
    engines = list(client.core_engines)
    to_workers = isinstance(call.method, str) and call.method.startswith(_WORKERS)
    if len(engines) == 1 or not (to_workers or _is_update(client, call)):
        found = await original(call.method, call.timeout, call.args, call.kwargs)
        return _marked(found, 1) if to_workers and len(engines) == 1 else found
    asking = _Asking(client, {int.from_bytes(engine, "little"): engine for engine in engines}, call)
    # a caller that disconnects cancels its request, but a started update must complete
    return await asyncio.shield(asyncio.ensure_future(_on_all(original, asking)))


async def stage(ask: Ask, engines: Sequence[int]) -> Problems:
    """Fetch all bytes of a version to the machines of all engines, or of none. Returns the engines' problems."""
    staged = await ask(engines, STAGE)
    if any(staged.values()):
        await ask([each for each in engines if not staged[each]], DISCARD)
    return staged


async def take(ask: Ask, engines: Sequence[int], version: object) -> Problems:
    """Update all engines to a version, or none of them.

    No engine changes its weights before all engines have all bytes. If one fails later, the others roll back.

    Args:
        ask: calls engines. An engine that failed in an update receives no more calls of that update.
        engines: all engines.
        version: its name in errors.

    Returns:
        The engines' problems. If there are any, only engines that report the version have it.
    """
    staged = await stage(ask, engines)
    if any(staged.values()):
        return staged
    applied = await ask(engines, APPLY)
    took = [each for each in engines if not applied[each]]
    if len(took) == len(engines):
        return applied
    undone = await ask(took, UNDO)
    back = f"it has undone version {version}, which other engines have not taken"
    return {**applied, **{each: problem or back for each, problem in undone.items()}}


@dataclass
class _Asking:
    """A call to the workers of some engines.

    Attributes:
        client: vLLM's.
        engines: vLLM's identity of each, by its index.
        call: the call.
        answers: newest responses of each engine's workers, or the exception that the engine raised.
    """

    client: EnginesClient
    engines: Mapping[int, bytes]
    call: WorkersCall
    answers: dict[int, Any] = field(default_factory=dict)

    async def ask(
        self, engines: Sequence[int], method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Problems:
        """Call a method, and store the responses."""
        calls = [
            self.client._call_utility_async(
                "collective_rpc",
                method,
                self.call.timeout,
                tuple(args),
                dict(kwargs),
                engine=self.engines[each],
            )
            for each in engines
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        self.answers.update(zip(engines, found, strict=True))
        return {each: _problem(self.answers[each]) for each in engines}

    async def do(self, engines: Sequence[int], phase: str) -> Problems:
        """Run a step of the call's update: through vLLM's own method, which raises failures, or through the workers'
        own methods, which return them.
        """
        if self.call.method == _TRANSFER:
            kwargs = {"update_info": _in_phase((self.call.kwargs or {})["update_info"], phase)}
            return await self.ask(engines, _TRANSFER, (), kwargs)
        args = () if phase == DISCARD else self.call.args
        return await self.ask(engines, _WORKERS + phase, args, {})


async def _on_all(original: Callable[..., Awaitable[Any]], asking: _Asking) -> Any:
    engines, call = list(asking.engines), asking.call
    if call.method == _TRANSFER:
        info = (call.kwargs or {})["update_info"]
        if _agree_themselves(asking.client):
            return await original(call.method, call.timeout, call.args, call.kwargs)
        async with _turn(asking.client):
            if _phase(_each(info)[0]) == STAGE:
                problems = await stage(asking.do, engines)
            else:
                problems = await take(asking.do, engines, _version_of(info))
        if any(problems.values()):
            raise FailedPrecondition(
                f"not all engines of this server have taken version {_version_of(info)}",
                details=[f"engine {each}: {problem}" for each, problem in problems.items() if problem],
            )
        return [None] * len(engines)
    if call.method == _APPLY and not _agree_themselves(asking.client):
        async with _turn(asking.client):
            problems = await take(asking.do, engines, call.args[0])
    else:
        problems = await asking.ask(engines, call.method, call.args, call.kwargs or {})
    return _marked(_joined(asking.answers, problems), len(engines))


_turns: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()


def _turn(client: EnginesClient) -> asyncio.Lock:
    """Lock of a server's updates: engines that receive two updates in different orders would end with different
    versions.
    """
    return _turns.setdefault(client, asyncio.Lock())


def _is_update(client: EnginesClient, call: WorkersCall) -> bool:
    """Test whether a call is vLLM's own update of weights from the service.

    A call that only begins to prepare a version is passed to vLLM unchanged.
    """
    if call.method != _TRANSFER or not call.kwargs or "update_info" not in call.kwargs:
        return False
    transfer = getattr(client.vllm_config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == NAME and all(
        isinstance(each, Mapping) and _phase(each) in (STAGE, APPLY) for each in _each(call.kwargs["update_info"])
    )


def changes_parameters(call: WorkersCall) -> bool:
    """Test whether a call may change the parameters of workers whose transfer engine is weighbridge's."""
    if call.method != _TRANSFER:
        return call.method in (_APPLY, _UNDO)
    infos = _each((call.kwargs or {}).get("update_info", [*call.args, {}][0]))
    return any(not isinstance(each, Mapping) or _phase(each) in (APPLY, UNDO) for each in infos)


def _agree_themselves(client: EnginesClient) -> bool:
    """Test whether the workers of all engines are in one group, such as workers that share experts.

    A step that fails in one is then raised in all.
    """
    config = client.vllm_config
    return bool(config.model_config.is_moe and config.parallel_config.data_parallel_size > 1)


def _each(info: Any) -> Sequence[Any]:
    """An update's information for each worker, or the common one."""
    return info if isinstance(info, list) else [info]


def _phase(info: Mapping[str, Any]) -> str:
    return str(info.get("phase", APPLY))


def _in_phase(info: Any, phase: str) -> Any:
    changed = [{**each, "phase": phase} for each in _each(info)]
    return changed if isinstance(info, list) else changed[0]


def _version_of(info: Any) -> object:
    return _each(info)[0].get("version")


def _problem(found: Any) -> str:
    """Failure that an engine or its workers report; empty on success."""
    if isinstance(found, BaseException):
        return str(found).removeprefix("Call to collective_rpc method failed: ") or repr(found)
    for each in found or ():
        if isinstance(each, Mapping) and each.get("failed"):
            return str(each["failed"])
    return ""


def _joined(found: Mapping[int, Any], problems: Problems) -> list[Any]:
    """The responses of all workers, engine by engine; those of an engine with a problem contain it."""
    answers: list[Any] = []
    for engine, there in sorted(found.items()):
        problem = problems.get(engine) or _problem(there)
        if isinstance(there, BaseException):
            answers.append({"engine": engine, "rank": 0, "failed": problem})
        else:
            answers += [{**each, "failed": each.get("failed") or problem} for each in there]
    return answers


def _marked(answers: Any, engines: int) -> Any:
    """Responses with the number of this server's engines added."""
    return [{**each, "engines": engines} if isinstance(each, Mapping) else each for each in answers or ()]
