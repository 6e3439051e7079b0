"""Guard in an engine's core: a request with a weighbridge adapter is computed only on the base that the adapter names.

The core is one thread. It does nothing else between accepting a request and the step that computes it, or between a
call that changed the parameters and the next step. So a comparison made here is still valid when the step runs, even if
API servers saw an older state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import Any

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.vllm_adapters.names import key_in
from weighbridge.integrations.vllm_adapters.serving import EngineState, base_problem, together

log = logging.getLogger(f"vllm.plugins.{__name__}")

STATE, LOAD = "weighbridge_adapter_state", "weighbridge_load_adapter"
NAMES, UNLOAD = "weighbridge_adapter_names", "weighbridge_unload_adapter"
"""Additional calls that API servers make to the core."""
_GUARD = "_weighbridge_guard"
_MARK = "_weighbridge_guarded"
_KEEPS_PARAMETERS = frozenset(
    f"weighbridge_{each}" for each in ("connect", "prepare", "prepare_early", "stage", "status", "evidence", "discard")
)
"""Calls of workers that leave the parameters as they are. Any other call may change them."""


def install(core: Any) -> None:
    """Guard every engine of this process. Calling it again changes nothing.

    Args:
        core: vLLM's class of an engine's core. Its calls to workers are wrapped last, outside the wrappers that load
            versions.

    Raises:
        FailedPrecondition: this release of vLLM provides no known way to refuse a request.
    """
    if hasattr(core, _MARK):
        return
    if not all(
        hasattr(core, each) for each in ("add_request", "collective_rpc", "wake_up", "list_loras", "remove_lora")
    ):
        raise FailedPrecondition("the engine core of this vLLM is not known", fix="serve adapters with vLLM 0.32")
    setattr(core, _MARK, True)
    add, call, wake = core.add_request, core.collective_rpc, core.wake_up

    @wraps(add)
    def add_request(self: Any, request: Any, *more: Any, **named: Any) -> Any:
        if _is_ours(request.lora_request) and (problem := guard_of(self).problem(request.lora_request)):
            return guard_of(self).refuse([request], problem)
        return add(self, request, *more, **named)

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(self, method, *args, **named)
        finally:
            if not (isinstance(method, str) and method in _KEEPS_PARAMETERS):
                guard_of(self).parameters_changed()

    @wraps(wake)
    def wake_up(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return wake(self, *args, **named)
        finally:
            guard_of(self).parameters_changed()

    core.add_request, core.collective_rpc, core.wake_up = add_request, collective_rpc, wake_up
    setattr(core, STATE, lambda self: guard_of(self).answer_state())
    setattr(core, LOAD, lambda self, order: guard_of(self).load(order))
    setattr(core, NAMES, lambda self: guard_of(self).answer_names())
    setattr(core, UNLOAD, lambda self, name: guard_of(self).unload(name))


class AdaptersGuard:
    """Adapters of one engine.

    Args:
        core: vLLM's engine core.
        state_of, load_adapter: the functions of `workers` to call in workers.
    """

    def __init__(self, core: Any, state_of: Callable[..., Any], load_adapter: Callable[..., str]) -> None:
        self._core = core
        self._state_of = state_of
        self._load_adapter = load_adapter
        self._state: EngineState | None = None
        """None until the workers are asked, and after each call that may have changed the parameters."""
        self._names: dict[int, str] = {}
        """Name of each number that was ever used: vLLM knows an adapter by its number alone."""

    @property
    def state(self) -> EngineState:
        """State of the workers."""
        if self._state is None:
            found = self._core.model_executor.collective_rpc(self._state_of)
            self._state = together([EngineState.of(each) for each in found])
        return self._state

    def answer_state(self) -> dict[str, Any]:
        """`state`, as an API server reads it."""
        return asdict(self.state)

    def problem(self, request: Any) -> str:
        """Reason why a weighbridge adapter must not be used now; empty if it may be used."""
        return base_problem(request.lora_name, request.base_model_name or "", self.state)

    def load(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Make all workers load an adapter, unless its base differs or another name has its number.

        Args:
            order: the fields of a `names.Order`.

        Returns:
            Strings that are empty on success: ``base``, if the base differs; ``asleep``; ``taken``, the name that has
            the number; ``failed``.
        """
        name, number = str(order["name"]), int(order["number"])
        found = {
            "base": base_problem(name, str(order["base"]), self.state),
            "asleep": "",
            "taken": "",
            "failed": "",
        }
        if self._core.model_executor.is_sleeping:  # its memory may be unmapped
            return {**found, "asleep": f"the engine sleeps, and cannot load {name}"}
        other = self._names.setdefault(number, name)
        if other != name:
            found["taken"] = other
        elif not found["base"]:
            answers = self._core.model_executor.collective_rpc(self._load_adapter, args=(dict(order),))
            found["failed"] = next((each for each in answers if each), "")
        return found

    def answer_names(self) -> list[str]:
        """Names of the weighbridge adapters in the workers' memory."""
        return sorted(self._names[each] for each in self._core.list_loras() if each in self._names)

    def unload(self, name: str) -> bool:
        """Make all workers drop an adapter from memory. Returns whether they had it.

        A running request with it loads it again: vLLM knows its folder.
        """
        had = self._core.list_loras()
        found = next((each for each, other in self._names.items() if other == name and each in had), None)
        return found is not None and bool(self._core.remove_lora(found))

    def parameters_changed(self) -> None:
        """Refuse waiting and running requests if the engine no longer has the base of their adapter."""
        self._state = None
        requests = self._core.scheduler.requests
        mine = [each for each in requests.values() if _is_ours(each.lora_request) and not each.is_finished()]
        for request in mine:
            if problem := self.problem(request.lora_request):
                self._finish(request)
                self.refuse([request], problem)

    def refuse(self, requests: Iterable[Any], problem: str) -> None:
        """End requests with an error. `middleware` converts it to a response in the API servers."""
        for request in requests:
            log.warning("request %s is refused: %s", request.request_id, problem)
            self._core._send_error_outputs_to_client([request.request_id], request.client_index)

    def _finish(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        self._core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)


def guard_of(core: Any) -> AdaptersGuard:
    """The guard of an engine."""
    found: AdaptersGuard | None = getattr(core, _GUARD, None)
    if found is None:
        from weighbridge.integrations.vllm_adapters import workers

        found = AdaptersGuard(core, workers.state_of, workers.load_adapter)
        setattr(core, _GUARD, found)
    return found


def _is_ours(request: Any) -> bool:
    return request is not None and bool(key_in(request.lora_path))
