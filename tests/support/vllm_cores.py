"""Core of a vLLM engine, which goes through sleep as in the source of vLLM 0.24 to 0.32 (``v1/engine/core``,
``v1/executor/abstract``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from weighbridge.integrations.vllm.sleeping import SleepHooks


@dataclass
class Executor:
    """vLLM's executor: the tags of what sleeps, and workers that are called."""

    sleeping_tags: set[str] = field(default_factory=set)
    worker: Any = None

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        return [None] if isinstance(method, str) else [method(self.worker, *args)]


class Core:
    """vLLM's core of an engine, in the process of its caller."""

    def __init__(self, backend: str) -> None:
        self.model_executor = Executor(worker=self)
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.running = True
        self.did: list[Any] = []
        self._weight_version = "acme/tiny@1"

    def pause_scheduler(self, mode: str = "abort") -> None:
        self.did.append(f"pause {mode}")
        self.running = False

    def resume_scheduler(self) -> None:
        self.did.append("go on")
        self.running = True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.pause_scheduler(mode)
        if level and not self.model_executor.sleeping_tags:  # 0.24: one that is half awake does not sleep again
            self.model_executor.sleeping_tags |= {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        asleep = self.model_executor.sleeping_tags
        asleep -= set(asleep if tags is None else tags)
        if not asleep:
            self.resume_scheduler()

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)


def watched(bring: Callable[..., Any], backend: str = "weighbridge") -> Core:
    """A core that the plug-in watches over.

    Args:
        bring: call of its one worker, with the core in the worker's place.
        backend: backend of weight transfer.
    """
    own = {name: each for name, each in vars(Core).items() if name not in ("__dict__", "__weakref__")}
    base = type("Core", (), own)  # the methods of vLLM's class are replaced, and each test has one of its own
    process = type("CoreProc", (base,), {"pause_scheduler": Core.pause_scheduler})  # pauses in its own way
    for _ in range(2):
        SleepHooks("weighbridge", bring, lambda core: core.did.append("forget")).begin(base)
    return cast("Core", process(backend))
