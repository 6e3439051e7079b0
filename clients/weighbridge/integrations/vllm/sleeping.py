"""Sleep of a vLLM engine, in its core: a wake-up applies the waiting version, and the engine does not compute without
memory.

vLLM's core maps the memory of weights and KV cache again, by tags, and resumes requests when both have memory.
`SleepHooks` wraps the functions that do this. It requires only vLLM's core, as `VllmCore`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

from weighbridge.errors import FailedPrecondition

log = logging.getLogger(f"vllm.plugins.{__name__}")

_WEIGHTS, _CACHE = "weights", "kv_cache"
"""vLLM's tags of sleeping memory."""
_DISCARDS = 2
"""Level of sleep from which weights are not kept in host memory."""
_LOST, _UNSETTLED = "_weighbridge_lost", "_weighbridge_unsettled"
"""Attributes of a core: whether sleep has discarded the weights; whether it has slept and its version has not been
settled since.
"""


class Executor(Protocol):
    """Part of vLLM's executor that is used."""

    sleeping_tags: set[str]

    def collective_rpc(self, method: Any, *, args: Sequence[Any]) -> list[Any]:
        """Call all workers of the engine."""


class VllmCore(Protocol):
    """Part of vLLM's ``EngineCore`` that is used."""

    vllm_config: Any
    model_executor: Executor


Bring = Callable[[Any, bool, bool], Mapping[str, Any]]
"""`weighbridge.integrations.vllm.worker.bring_after_sleep`."""


@dataclass(frozen=True)
class SleepHooks:
    """Hooks for the sleep of engines.

    Attributes:
        backend: backend of weight transfer; engines with a different one are not changed.
        bring: called in each worker.
        forget: empties the caches of a core.
    """

    backend: str
    bring: Bring
    forget: Callable[[Any], None]

    def begin(self, core: Any) -> None:
        """Wrap the methods of vLLM's class of the engine's core, and of its subclasses. Idempotent."""
        if hasattr(core.wake_up, "__wrapped__"):
            return
        self._wrap_sleep(core)
        self._wrap_wake_up(core)
        self._wrap_calls(core)
        for each in _with_subclasses(core):
            if "pause_scheduler" in vars(each):
                self._wrap_pause(each)
            if "resume_scheduler" in vars(each):
                self._wrap_resume(each)

    def settle(self, core: VllmCore, *, last: bool) -> None:
        """Apply pending versions before an engine resumes, now that its weights have memory.

        Args:
            core: core of the engine.
            last: whether it resumes after this.

        Raises:
            FailedPrecondition: the engine should have a version but serves none; states why. Another call retries.
        """
        lost = bool(getattr(core, _LOST, False))
        answers = [each for each in core.model_executor.collective_rpc(self.bring, args=(lost, last)) if each]
        setattr(core, _LOST, False)
        if any(each["changed"] for each in answers):
            self.forget(core)
        # `finish_weight_update` may already have set the label of a failed version
        served = {each["served"] for each in answers if each["changed"] or each["failed"]}
        if len(served) == 1 and hasattr(core, "_weight_version"):  # not in 0.24
            core._weight_version = served.pop() or "default"
        failed = list(dict.fromkeys(each["failed"] for each in answers if each["failed"]))
        if last and any(each["owes"] for each in answers):
            raise FailedPrecondition(
                "the engine is awake, serves no version, and is paused",
                fix="wake it up again, or update it to any version and resume it",
                details=failed,
            )
        for problem in failed:
            log.error("the wake-up could not apply the waiting version: %s", problem)
        setattr(core, _UNSETTLED, not last)

    def _is_ours(self, core: VllmCore) -> bool:
        transfer = core.vllm_config.weight_transfer_config
        return transfer is not None and transfer.backend == self.backend

    def _wrap_sleep(self, core: Any) -> None:
        original = core.sleep

        @wraps(original)
        def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
            lost, ends_later = getattr(self, _LOST, False), None
            if level >= _DISCARDS and _WEIGHTS not in self.model_executor.sleeping_tags:
                setattr(self, _LOST, True)
            try:
                ends_later = original(self, level, *args, **kwargs)
                return ends_later
            finally:
                # sleep failed, or is not reported while a part sleeps, as in 0.24
                if ends_later is None and _WEIGHTS not in self.model_executor.sleeping_tags:
                    setattr(self, _LOST, lost)

        core.sleep = sleep

    def _wrap_wake_up(self, core: Any) -> None:
        watch, original = self, core.wake_up

        @wraps(original)
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            slept = set(self.model_executor.sleeping_tags)
            if slept and watch._is_ours(self):
                setattr(self, _UNSETTLED, True)
            found = original(self, tags)  # resumes the scheduler, below, if all is awake
            left = self.model_executor.sleeping_tags
            if left and _WEIGHTS in slept - left and watch._is_ours(self):
                watch.settle(self, last=False)
            return found

        core.wake_up = wake_up

    def _wrap_calls(self, core: Any) -> None:
        """For callers that put workers to sleep and wake them directly, through calls that the core does not
        inspect.
        """
        watch, original = self, core.collective_rpc

        @wraps(original)
        def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            found = original(self, method, timeout, args, kwargs)
            if method in ("sleep", "wake_up") and watch._is_ours(self):
                given = [*args, *(kwargs or {}).values(), None][0]
                if method == "sleep":
                    setattr(self, _LOST, (given or 1) >= _DISCARDS)
                elif _names(given, _WEIGHTS) or _names(given, _CACHE):
                    watch.settle(self, last=_names(given, _CACHE))
            return found

        core.collective_rpc = collective_rpc

    def _wrap_pause(self, core: Any) -> None:
        watch, original = self, core.pause_scheduler

        @wraps(original)
        def pause_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.model_executor.sleeping_tags and watch._is_ours(self):
                return None  # it is paused, its caches are empty, and another pause mode may let it compute
            return original(self, *args, **kwargs)

        core.pause_scheduler = pause_scheduler

    def _wrap_resume(self, core: Any) -> None:
        watch, original = self, core.resume_scheduler

        @wraps(original)
        def resume_scheduler(self: Any) -> Any:
            if watch._is_ours(self):
                if asleep := self.model_executor.sleeping_tags:
                    log.info("%s sleeps; the engine continues when it wakes up", " and ".join(sorted(asleep)))
                    return None
                if getattr(self, _UNSETTLED, False):
                    watch.settle(self, last=True)
            return original(self)

        core.resume_scheduler = resume_scheduler


def _names(tags: Collection[str] | None, tag: str) -> bool:
    """Test whether tags of a wake-up include one; without tags, all are included."""
    return not tags or tag in tags


def _with_subclasses(core: Any) -> Iterator[Any]:
    yield core
    for each in core.__subclasses__():
        yield from _with_subclasses(each)
