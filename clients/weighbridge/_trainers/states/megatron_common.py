"""Common state of Megatron-core's checkpoints (``common.pt``): all values other than elementwise tensors, in the form
that Megatron's loaders expect.

It is a dict of the values that the trainer has named, and ``optimizer``, which is the state of one optimizer or a dict
of several by number. A plain optimizer has ``state.common_step`` and ``param_groups``; an optimizer with float32 copies
has both below ``optimizer``; and the distributed optimizer has its steps in the groups. ``content_metadata`` describes
the form of the tensors. Source: ``megatron.core.optimizer`` and ``dist_checkpointing`` of 0.16,
``megatron/training/checkpointing.py`` of Megatron-LM.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weighbridge.errors import DataLoss

_OPTIMIZER = "optimizer"
_CONTENT = "content_metadata"
_ARGUMENTS = "args"
_FULLY_RESHARDABLE = "fully_reshardable"
_VERSION = 3.0
_OF_A_LAYER = re.compile(r"\.layers\.\d+\.")
_HALF = re.compile(r"\.(?:weight|bias)_[wv]$")


def common_state(
    optimizer: Mapping[str, Any], state: Mapping[str, Any], tensors: Iterable[str], step: int
) -> dict[str, Any]:
    """Return the common state of a checkpoint.

    Args:
        optimizer: result of `megatron_values.values_of`.
        state: values that the trainer has named. ``args`` becomes the namespace that Megatron-LM expects.
        tensors: names of the checkpoint's tensors.
        step: the trainer's step, which becomes the iteration unless the trainer names one.
    """
    names = list(tensors)
    made: dict[str, Any] = {
        "iteration": step,
        "checkpoint_version": _VERSION,
        _CONTENT: {
            "distrib_optim_sharding_type": _FULLY_RESHARDABLE,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": any(_HALF.search(name) for name in names),
            "non_homogeneous_layers": any(_OF_A_LAYER.search(name) for name in names),
        },
        **state,
    }
    if isinstance(made.get(_ARGUMENTS), Mapping):
        made[_ARGUMENTS] = argparse.Namespace(**made[_ARGUMENTS])
    groups = optimizer["groups"]
    # if experts are distributed over ranks, Megatron gives them a separate optimizer
    parts = [
        [group for group in groups if bool(group["values"].get("is_expert_parallel")) is own] for own in (False, True)
    ]
    scalers = optimizer["grad_scalers"]
    states = [
        _optimizer_state(part, scalers[min(index, len(scalers) - 1)] if scalers else None)
        for index, part in enumerate(part for part in parts if part)
    ]
    if states:
        made[_OPTIMIZER] = states[0] if len(states) == 1 else dict(enumerate(states))
    return made


def _optimizer_state(groups: Sequence[Mapping[str, Any]], scaler: Any) -> dict[str, Any]:
    import torch

    kind = groups[0]["kind"].partition(" ")[0]
    steps = [group["step"] for group in groups if group["step"] is not None]
    scaled = {} if scaler is None else {"grad_scaler": scaler}
    if kind == "DistributedOptimizer":
        stepped = [
            {**group["values"], **({} if group["step"] is None else {"step": group["step"]})} for group in groups
        ]
        return {
            _OPTIMIZER: {"param_groups": stepped},
            **scaled,
            "param_state_sharding_type": _FULLY_RESHARDABLE,
        }
    state = {"common_step": torch.tensor(steps[0], dtype=torch.float32, device="cpu")} if steps else {}
    inner = {"state": state, "param_groups": [dict(group["values"]) for group in groups]}
    return inner if kind == "FP32Optimizer" else {_OPTIMIZER: inner, **scaled}


def optimizer_values(common: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of a checkpoint's optimizers, as `megatron_values.values_of` does, except that their kinds are
    None.

    Args:
        common: the checkpoint's common state.
        name: name of the checkpoint, for errors.

    Raises:
        DataLoss: Megatron did not write the common state.
    """
    found = common.get(_OPTIMIZER)
    if found is None:
        return {"groups": [], "grad_scalers": []}
    try:
        several = all(isinstance(key, int) for key in found)
        states = [found[key] for key in sorted(found)] if several else [found]
        groups: list[dict[str, Any]] = []
        for state in states:
            inner = state.get(_OPTIMIZER, state)
            common_step = inner.get("state", {}).get("common_step")
            for group in inner["param_groups"]:
                step = group.get("step") if common_step is None else common_step
                values = {key: value for key, value in group.items() if key != "params"}
                groups.append({"kind": None, "values": values, "step": None if step is None else float(step)})
        return {
            "groups": groups,
            "grad_scalers": [state["grad_scaler"] for state in states if "grad_scaler" in state],
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"the common state of {name} has no optimizer in the form that Megatron-core writes") from error


def named_values(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint's trainer has named. ``args`` is a dict."""
    found = {key: value for key, value in common.items() if key not in (_OPTIMIZER, _CONTENT)}
    if isinstance(found.get(_ARGUMENTS), argparse.Namespace):
        found[_ARGUMENTS] = vars(found[_ARGUMENTS])
    return found
