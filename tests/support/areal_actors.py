"""Ranks of an actor with AReaL's own parts stood in for, as far as updates of weights use them: what they do with a
real service over gloo.

Read in AReaL 1.0.4. `tests.frameworks.test_areal` runs its real trainer; here are the faults that it cannot make.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from weighbridge import TrainerClient
from weighbridge.errors import WeighbridgeError

MODEL = "tests/policy"
FACTOR = -2.0
MEMBERS = [1, 2]
"""Ranks of the job that have the actor; the others have something else."""


@dataclass
class Meta:
    """Those fields of AReaL's ``WeightUpdateMeta`` that are read."""

    path: str
    version: int
    use_lora: bool = False


class Rollouts:
    """AReaL's remote engine: loads the folder of each update, removes it as AReaL does, and fails as ``fault`` says."""

    def __init__(self) -> None:
        self.fault = ""
        self.generates = True
        self.folders: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}

    def pause_generation(self) -> None:
        self.generates = False

    def continue_generation(self) -> None:
        self.generates = True

    def update_weights_from_disk(self, meta: Meta) -> Future[None]:
        done: Future[None] = Future()
        self.folders.append(meta.path)
        if self.fault == "hangs":
            return done
        if self.fault == "refuses":
            done.set_exception(RuntimeError("refused"))
            return done
        files = sorted(Path(meta.path).glob("*.safetensors"))
        self.loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        for file in Path(meta.path).iterdir():
            file.unlink()
        Path(meta.path).rmdir()
        done.set_result(None)
        return done


def actor(model: torch.nn.Module, hf_dir: str, group: dist.ProcessGroup) -> Any:
    """Actor of this rank, whose ``onload`` a test can make fail."""
    _install()
    from weighbridge.integrations.areal.updates import UpdatesByWeighbridge

    class Actor(UpdatesByWeighbridge):
        def __init__(self) -> None:
            self.model = model
            self.cpu_group = group
            self.rollout_engine = Rollouts()
            self.onload: Callable[[], None] = lambda: None
            self.config = SimpleNamespace(experiment_name="e", trial_name="t", path=hf_dir, weight_update_mode="disk")

        def get_version(self) -> int:
            return 0

        def _check_rollout_engine_connected(self) -> None:
            pass

        @contextmanager
        def _offload_aware_context(self) -> Iterator[None]:
            self.onload()
            yield

        def shards(self) -> Any:
            return self.model

        def hand_over(self, client: Any, model: str, shards: Any, **said: Any) -> Any:
            return client.push_state_dict(model, shards, **said)

    return Actor()


def updates(
    rank: int, address: str, hf_dir: str, root: str, model: torch.nn.Module, faults: Sequence[str]
) -> dict[str, Any]:
    """An update for each fault, of which some are the second member's and some the rollouts': what it has raised,
    how often ranks told each other something, and what the rollouts saw."""
    group = dist.new_group(MEMBERS, backend="gloo")
    if rank not in MEMBERS:
        return {}
    os.environ |= {"WEIGHBRIDGE_SERVER": address, "WEIGHBRIDGE_LANE": "grpc"}
    mine, second = actor(model, hf_dir, group), rank == MEMBERS[1]
    found: dict[str, Any] = {
        "raised": [],
        "left": [],
        "exchanges": [],
        "folders": mine.rollout_engine.folders,
    }
    gather = dist.all_gather_object

    def counted(*arguments: Any, **named: Any) -> None:
        found["exchanges"][-1] += 1
        gather(*arguments, **named)

    dist.all_gather_object = counted
    for number, fault in enumerate(faults):
        found["exchanges"].append(0)
        os.environ["WEIGHBRIDGE_MODEL"] = "" if fault == "no model" and second else MODEL
        if fault == "no service" and second:
            mine._client = TrainerClient("127.0.0.1:1", retry_seconds=0.5)
        mine.onload = _fail if fault == "no memory" and second else lambda: None
        mine.rollout_engine.fault = fault
        if fault == "hangs":
            mine._settings = replace(mine._settings, timeout_seconds=8.0)
        try:
            mine.update_weights(Meta(f"{root}/update_v1", number))
        except WeighbridgeError as error:
            found["raised"].append(f"{type(error).__name__}: {error}")
        else:
            found["raised"].append("")
        if fault == "no service" and second:
            del mine._client
        found["left"].append(len(list(Path(root).iterdir())))
        assert mine.rollout_engine.generates
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(FACTOR)
    return found | {"loaded": mine.rollout_engine.loaded}


def _fail() -> None:
    raise MemoryError("no memory to onload")


def _install() -> None:
    """Put in place those modules of AReaL that are imported."""
    marks: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {
        "areal": {},
        "areal.infra": {},
        "areal.infra.platforms": {"current_platform": SimpleNamespace(synchronize=lambda: None)},
        "areal.utils": {
            "names": SimpleNamespace(update_weights_from_disk=lambda *said: "/".join(map(str, said))),
            "name_resolve": SimpleNamespace(add=lambda name, value, **_: marks.update({name: value})),
        },
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
