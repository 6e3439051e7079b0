"""Trainer actors of slime and Miles, as far as weight updates go: the modules that they are in, and their calls in
their order.

Neither framework is in a package registry. Read in slime 624b824 (August 2026; the same in v0.3.1) and Miles 31f1ca9;
Ray is stood in for by handles that answer at once.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

INIT = "weighbridge.integrations.slime.init"
FRAMEWORKS = ("slime", "miles")

SIGNATURES = {
    "slime": {
        "__init__": "self, args, model, weights_getter, *, model_name, quantization_config",
        "connect_rollout_engines": (
            "self, rollout_engines, rollout_engine_lock, engine_gpu_counts, engine_gpu_offsets, engine_parallel_configs"
        ),
        "disconnect_rollout_engines": "self",
        "update_weights": "self",
        "pop_metrics": "self",
    },
    "miles": {
        "__init__": "self, args, model, weights_getter, *, model_name, quantization_config, is_lora",
        "connect_rollout_engines": "self, rollout_engines, rollout_engine_lock, engine_gpu_counts, engine_gpu_offsets",
        "is_rollout_engines_fresh": "self",
        "mark_engine_connection_stale": "self",
        "update_weights": "self",
        "pop_metrics": "self",
    },
}
"""Parameters of the class that is replaced, as its source names them."""


def arguments(framework: str, **more: Any) -> Namespace:
    """Arguments that select an updater: the framework's defaults, and the caller's own."""
    own: dict[str, Any] = {
        "slime": {"update_weight_mode": "full", "update_weight_transport": "nccl"},
        "miles": {"update_weight_transfer_mode": "broadcast", "pause_generation_mode": "retract"},
    }[framework]
    said = {"colocate": False, "custom_megatron_init_path": INIT, "hf_checkpoint": "", **own, **more}
    return Namespace(**said)


def _get(asked: Sequence[Any], timeout: float) -> list[Any]:
    """As ``ray.get``; a future is an answer that is still to come."""
    return [each.result(timeout) if isinstance(each, Future) else each for each in asked]


class UpdateWeightFromDistributed:
    """The updater that is replaced."""


def install(framework: str) -> ModuleType:
    """Put the modules in place that a trainer actor has imported; returns the module of the actor's class."""
    ray = ModuleType("ray")
    ray.get = _get  # type: ignore[attr-defined]
    groups = ModuleType(f"{framework}.utils.distributed_utils")
    groups.get_gloo_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]
    actor = ModuleType(f"{framework}.backends.megatron_utils.actor")
    actor.UpdateWeightFromDistributed = UpdateWeightFromDistributed  # type: ignore[attr-defined]
    for module in (ray, groups, actor):
        parts = module.__name__.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            sys.modules.setdefault(name, ModuleType(name))
        sys.modules[module.__name__] = module
    return actor


def forget() -> None:
    """Take these modules away again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in (*FRAMEWORKS, "ray") or name == "weighbridge.integrations.slime":
            del sys.modules[name]


@dataclass(frozen=True)
class EngineHandle:
    """Handle of an engine's actor."""

    framework: str
    url: str
    node_rank: int = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            ("slime", "get_url"): self.url if self.node_rank == 0 else None,
            ("miles", "get_topology_info"): {"url": self.url, "node_rank": self.node_rank},
        }
        if (self.framework, name) not in answers:
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda: answers[self.framework, name])


class TrainerActor:
    """One rank's actor, joined to the others by torch.distributed."""

    def __init__(
        self,
        framework: str,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        quantization_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._framework = framework
        module = install(framework)
        path, _, name = args.custom_megatron_init_path.rpartition(".")
        getattr(importlib.import_module(path), name)(args)
        more = {"is_lora": False} if framework == "miles" else {}
        self.weight_updater = module.UpdateWeightFromDistributed(
            args,
            model,
            weights_getter=dict,
            model_name="qwen3",
            quantization_config=quantization_config,
            **more,
        )
        if framework == "slime":
            self.weight_updater.weight_version = 0

    def update_weights(self, engines: Sequence[EngineHandle], new_engines: int) -> dict[str, float]:
        """As the actor's, and then the metrics that its next step logs."""
        updater = self.weight_updater
        if new_engines or (self._framework == "miles" and not updater.is_rollout_engines_fresh()):
            places = {"engine_gpu_counts": [2] * len(engines), "engine_gpu_offsets": [0] * len(engines)}
            if self._framework == "slime":
                places["engine_parallel_configs"] = [{"tp_size": 2}] * len(engines)  # type: ignore[list-item]
            updater.connect_rollout_engines(engines, None, **places)
            dist.barrier(group=dist.group.WORLD)
        updater.update_weights()
        found: dict[str, float] = updater.pop_metrics()
        return found
