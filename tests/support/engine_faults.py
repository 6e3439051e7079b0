"""Faults that are put into the parameters of a live engine: a plug-in of vLLM and SGLang beside weighbridge's, which
tests of proofs install.

An order travels as if it were the digest of a recording that the caller knows, so that it reaches every worker of every
engine by the way of proofs itself.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weighbridge import _lazy as lazy
from weighbridge._lazy.recording import RecordedCopy
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.evidence import Evidence
from weighbridge.integrations.engine_rank.rank import EngineRank

_ORDER = "fault:"
NOW = ("flip", "swap_rows", "swap_experts", "stale", "stale_packed")
"""Faults of what lies in memory: a bit; two rows; two experts of one shape, as a kernel has them; the parameter of a
name keeps the values of the version before, or what a kernel for processors has made of them does."""
NEXT = ("skip", "half", "record")
"""Faults of the next update: a rank that says it has taken it and has not; one that has taken one half of it; one whose
record of its loader exchanges two tensors of one shape."""
KEEP, RESTORE, WRONG, MUTE = "keep", "restore", "wrong", "mute"


def install(folder: Path) -> str:
    """Make the plug-in findable by a PYTHONPATH that begins with what this gives."""
    info = folder / "weighbridge_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weighbridge-faults\nVersion: 0\n")
    entry = "weighbridge_faults = tests.support.engine_faults:register\n"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}[sglang.srt.plugins]\n{entry}")
    return os.pathsep.join((str(folder), str(Path(__file__).parents[2])))


def order(kind: str, *, rank: int | None = None, engine: int | None = None, seed: int = 0, name: str = "") -> str:
    """Order for the ranks of these numbers; None for all.

    Args:
        kind: one of `NOW`, `NEXT`; `KEEP` to remember the values as those of the version before; `RESTORE` to put
            everything in order; `MUTE` to give no evidence; or `WRONG` to return the names of the parameters that the
            fault of the last update has made wrong.
        rank: number of the rank in its engine.
        engine: number of the engine behind the server.
        seed: seed of random choices.
        name: end of a parameter's name.
    """
    said = {"kind": kind, "rank": rank, "engine": engine, "seed": seed, "name": name}
    return _ORDER + json.dumps(said).encode().hex()


def told(ask: Callable[[Collection[str]], Any], given: str) -> dict[str, list[str]]:
    """Send an order; returns the parameters that it has made wrong, by rank."""
    found = ask([given])
    return {name: json.loads(each.recorded) for name, each in found.items()}


def register() -> None:
    """Entry point of the plug-in, called in each process of an engine."""
    if getattr(EngineRank.evidence, "injects", False):
        return
    original = EngineRank.evidence

    def evidence(self: EngineRank, known: Collection[str] = ()) -> Evidence:
        for each in known:
            if each.startswith(_ORDER):
                wrong = _obey(self, json.loads(bytes.fromhex(each.removeprefix(_ORDER))))
                return Evidence("", "", json.dumps(sorted(wrong)))
        if vars(self).get("faults_mute"):
            raise FailedPrecondition("this engine does not answer")
        return original(self, known)

    evidence.injects = True  # type: ignore[attr-defined]
    EngineRank.evidence = evidence  # type: ignore[method-assign]


@dataclass
class _Kept:
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    clean: dict[str, torch.Tensor] = field(default_factory=dict)
    packed: dict[str, Any] = field(default_factory=dict)
    recorded: Any = None
    wrong: set[str] = field(default_factory=set)


def _obey(rank: EngineRank, said: dict[str, Any]) -> set[str]:
    kept: _Kept = vars(rank).setdefault("faults_kept", _Kept())
    assert rank._recorded is not None
    live = dict(rank.engine.live(rank._recorded.recording)[0])
    kind, chance = said["kind"], random.Random(said["seed"])
    if kind == MUTE:
        vars(rank)["faults_mute"] = _is_meant(rank, said)
    elif kind == KEEP:
        kept.before = _clones(live)
        kept.packed = {name: layer.cpu_linear for name, layer in _packed(rank).items()}
    elif kind == RESTORE:
        _restore(rank, kept, live)
    elif kind == WRONG:
        return kept.wrong
    elif not _is_meant(rank, said):
        return set()
    elif kind in NEXT:
        if kind == "record":
            return _misrecord(rank, kept, live)
        vars(rank.engine)["fill"] = lambda *given: _fill_badly(rank, kept, kind, chance, *given)
    elif kind == "stale_packed":
        _packed(rank)[said["name"]].cpu_linear = kept.packed[said["name"]]
        return {f"{said['name']}.weight (packed)"}
    else:
        if kind == "swap_experts":
            live = dict(rank.engine.model.named_parameters())
        kept.clean = _clones(live)
        _spoil(kind, live, kept, chance, said["name"])
        return {name for name, tensor in live.items() if not _same(tensor, kept.clean[name])}
    return set()


def _is_meant(rank: EngineRank, said: dict[str, Any]) -> bool:
    config = getattr(rank.engine, "_vllm_config", None)
    engine = 0 if config is None else config.parallel_config.data_parallel_index
    return said["rank"] in (None, rank.engine.ranks.rank) and said["engine"] in (None, engine)


def _packed(rank: EngineRank) -> dict[str, Any]:
    return {name: layer for name, layer in rank.engine.model.named_modules() if hasattr(layer, "cpu_linear")}


def _clones(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in live.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8))


@torch.no_grad()
def _spoil(kind: str, live: dict[str, torch.Tensor], kept: _Kept, chance: random.Random, name: str) -> None:
    wide = {"swap_rows": 2, "swap_experts": 3}.get(kind, 0)
    fitting = sorted(
        each
        for each, tensor in live.items()
        if tensor.numel() and each.endswith(name) and (not wide or tensor.ndim == wide)
    )
    if not fitting:
        return
    tensor = live[chance.choice(fitting)].data
    if kind == "stale":
        (found,) = fitting
        tensor.copy_(kept.before[found])
    elif wide:
        first, second = chance.sample(range(len(tensor)), 2)
        tensor[[first, second]] = tensor[[second, first]]
    else:
        index = tuple(chance.randrange(size) for size in tensor.shape)
        bits = tensor[index].clone().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        tensor[index] = (bits ^ (1 << chance.randrange(8 * tensor.element_size() - 1))).view(tensor.dtype)


@torch.no_grad()
def _fill_badly(rank: EngineRank, kept: _Kept, kind: str, chance: random.Random, *given: Any) -> None:
    fill = type(rank.engine).fill
    del vars(rank.engine)["fill"]
    recording: lazy.Recording = given[1]
    before = _clones(dict(rank.engine.live(recording)[0]))
    if kind == "skip":
        kept.wrong = set(before)
        return
    fill(rank.engine, *given)
    live = rank.engine.live(recording)[0]
    half = chance.sample(sorted(live), len(live) // 2)
    kept.wrong = {name for name in half if not _same(live[name], before[name])}
    for name in half:
        live[name].data.copy_(before[name])


def _misrecord(rank: EngineRank, kept: _Kept, live: dict[str, torch.Tensor]) -> set[str]:
    recorded = rank._recorded
    assert recorded is not None
    kept.recorded = recorded
    steps = list(recorded.recording.steps)
    fitting: dict[Any, list[int]] = {}
    for at, step in enumerate(steps):
        if isinstance(step, RecordedCopy) and step.target in live and "layers.1." in step.target:
            fitting.setdefault((len(step.box.extent), step.box.extent, step.part.size, step.view), []).append(at)
    first, second = fitting[max(alike for alike, there in fitting.items() if len(there) > 1)][:2]
    a, b = steps[first], steps[second]
    assert isinstance(a, RecordedCopy)
    assert isinstance(b, RecordedCopy)
    steps[first] = a._replace(tensor=b.tensor, box=b.box)
    steps[second] = b._replace(tensor=a.tensor, box=a.box)
    rank._recorded = replace(recorded, recording=replace(recorded.recording, steps=tuple(steps)))
    return {a.target, b.target}


@torch.no_grad()
def _restore(rank: EngineRank, kept: _Kept, live: dict[str, torch.Tensor]) -> None:
    vars(rank.engine).pop("fill", None)
    vars(rank).pop("faults_mute", None)
    there = {**dict(rank.engine.model.named_parameters()), **live}
    for name, tensor in kept.clean.items():
        there[name].data.copy_(tensor)
    if kept.recorded is not None:
        rank._recorded = kept.recorded
    kept.recorded, kept.clean, kept.wrong = None, {}, set()
