"""API server of vLLM with several engines, in this process: the plug-in's part of it is the real one, engines and
workers are made up.

Routes and the way to engines are as in the source of vLLM 0.32 (``entrypoints/serve/dev``, ``entrypoints/rl/online``,
``v1/engine/core_client``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.json_servers import Answer, json_server
from weighbridge.integrations.vllm.engines import WorkersCall, collective_rpc

MODEL = "acme/tiny"


@dataclass
class FakeEngine:
    """One engine, whose workers do the same.

    Attributes:
        index: its number among the engines of the server.
        workers: number of its workers.
        fails: the phases that it cannot do; ``prepare`` as one that cannot reach the service.
        served: version in its parameters; None for none.
        instance: identity of this start of the engine.
        asleep: whether its weights have no memory, and updates wait.
    """

    index: int
    workers: int = 1
    fails: set[str] = field(default_factory=set)
    served: int | None = 1
    prepared: int | None = None
    before: int | None = None
    error: str = ""
    group: int = 1
    instance: str = "first"
    paused: bool = False
    label: str = "default"
    asked: list[str] = field(default_factory=list)
    asleep: bool = False
    waiting: int | None = None

    def do(self, phase: str, version: int | None) -> str:
        """Run a phase; returns the error, or an empty text."""
        self.asked.append(phase if version is None else f"{phase} {version}")
        if phase in self.fails and phase != "prepare":
            return f"{phase} of version {version} failed, and the engine keeps version {self.served}"
        match phase:
            case "prepare":
                self.error = "the service cannot be reached" if phase in self.fails else ""
                self.prepared = None if self.error else version
            case "stage" if self.prepared != version:
                if "prepare" in self.fails:
                    return f"version {version} was not prepared, and the engine keeps version {self.served}"
                self.prepared = version
            case "apply":
                if self.prepared != version:
                    return f"version {version} was not prepared, and the engine keeps version {self.served}"
                if self.asleep:
                    self.waiting = version
                    return ""
                self.before, self.served, self.prepared = self.served, version, None
            case "undo" if self.waiting == version:
                self.waiting = None
            case "undo" if self.served == version:
                self.served = self.before
            case "discard":
                self.prepared = None
        return ""

    def answers(self, failed: str) -> list[dict[str, Any]]:
        """Answers of its workers."""
        status = {
            "served": "" if self.served is None else f"{MODEL}@{self.served}",
            "prepared": "" if self.prepared is None else f"{MODEL}@{self.prepared}",
            "waiting": "" if self.waiting is None else f"{MODEL}@{self.waiting}",
            "nbytes": 5,
            "error": self.error,
            "failed": failed,
        }
        return [
            {
                **status,
                "instance": f"{self.instance} {self.index}.{rank}",
                "engine": self.index,
                "rank": rank,
                "ranks": self.workers,
                "group": self.group,
            }
            for rank in range(self.workers)
        ]


class FakeVllm:
    """One API server.

    Args:
        engines: those behind it.
        plugin: whether weighbridge's plug-in is in the API server, and not in workers alone.
        moe: whether experts are shared among the engines.
    """

    def __init__(self, engines: Sequence[FakeEngine], *, plugin: bool = True, moe: bool = False) -> None:
        self.engines = list(engines)
        self.plugin = plugin
        self.core_engines = [each.index.to_bytes(2, "little") for each in engines]
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="weighbridge"),
            model_config=SimpleNamespace(is_moe=moe),
            parallel_config=SimpleNamespace(data_parallel_size=len(engines)),
        )

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        """vLLM's own name."""
        assert method == "collective_rpc"
        name, _, positional, named = args
        await asyncio.sleep(0)
        there = self.engines[self.core_engines.index(engine)]
        if name == "update_weights":
            info = named["update_info"]
            info = info[there.index] if isinstance(info, list) else info
            if failed := there.do(info.get("phase", "apply"), info["version"]):
                raise Exception(f"Call to collective_rpc method failed: {failed}")
            return [None] * there.workers
        if not name.startswith("weighbridge_"):
            return [f"{name} of engine {there.index}"] * there.workers
        phase = name.removeprefix("weighbridge_")
        version = int(positional[0]) if positional and phase != "connect" else None
        return there.answers("" if phase in ("status", "connect") else there.do(phase, version))

    async def of_vllm(self, *call: Any) -> Any:
        """vLLM's own way: all are asked, and the first one's answer is given."""
        calls = [self._call_utility_async("collective_rpc", *call, engine=each) for each in self.core_engines]
        return (await asyncio.gather(*calls))[0]

    async def rpc(self, method: str, *args: str, **kwargs: Any) -> Any:
        """A call of all workers, as routes make it."""
        call = WorkersCall(method, None, args, kwargs)
        if self.plugin:
            return await collective_rpc(self.of_vllm, self, call)
        return await self.of_vllm(method, None, args, kwargs)

    def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Answer of one of the server's routes."""
        path, _, _ = path.partition("?")
        match path:
            case "/collective_rpc":
                return 200, {"results": asyncio.run(self.rpc(body["method"], *body["args"]))}
            case "/get_world_size":
                return 200, {"world_size": sum(each.workers for each in self.engines)}
            case "/pause" | "/resume":
                for each in self.engines:
                    each.paused = path == "/pause"
                    each.asked.append(path)
                return 200, {}
            case "/update_weight_version":
                for each in self.engines:
                    each.label = body["new_version"]
                return 200, {}
        return 404, {"detail": "Not Found"}

    @property
    def served(self) -> list[int | None]:
        """Versions in the engines' parameters."""
        return [each.served for each in self.engines]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL."""
        with json_server(lambda path, body: self.answer(path, json.loads(json.dumps(body)))) as url:
            yield url
