"""Checks of a version against the engine that will load it.

An engine's loader may silently skip tensors that it has no parameter for: with two additional experts or layers, it
would load the rest without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weighbridge import _lazy as lazy
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import first_lines, named
from weighbridge.errors import FailedPrecondition

_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Settings that determine which tensors exist and their sizes."""
_MOST_NAMED = 8
_FIX = "start an engine from this version"


def refuse_updates(setting: str, why: str, instead: str) -> None:
    """Refuse updates of an engine whose responses would still be computed from old weights in part.

    Args:
        setting: setting of the engine.
        why: reason.
        instead: setting to start the engine with instead.

    Raises:
        FailedPrecondition: always.
    """
    raise FailedPrecondition(
        f"this engine has {setting}, and cannot take new weights while it serves: {why}",
        fix=f"{instead}; or start the engine again from the new version",
    )


def check_config(engine: Any, config: bytes, version: object) -> None:
    """Refuse a version whose configuration describes a different model than the engine's.

    Args:
        engine: the configuration of the engine's model.
        config: ``config.json`` of the version.
        version: what to call it.

    Raises:
        FailedPrecondition: names what differs.
    """
    found = json.loads(config)
    wrong = []
    for field in _FIELDS:
        # by attribute: newer releases of transformers write some under another name. SGLang pads heads on CPUs and
        # keeps the original number
        ours = getattr(engine, f"original_{field}", getattr(engine, field, None))
        theirs = found.get(field)
        if ours is not None and theirs is not None and ours != theirs:
            wrong.append(f"{field} is {theirs}, and {ours} in the engine")
    if wrong:
        raise FailedPrecondition(
            f"{version} is of a different model than the engine was started with: {'; '.join(wrong)}",
            fix=_FIX,
        )


def check_tensors(known: Iterable[TensorSpec], found: Iterable[TensorSpec], version: object) -> None:
    """Refuse a version whose tensors differ from those of the previous version; their dtypes may differ.

    Raises:
        FailedPrecondition: tensors are missing, unexpected or have a different shape; the message names them.
    """
    before = {spec.name: spec.shape for spec in known}
    now = {spec.name: spec.shape for spec in found}
    wrong = [f"{name} is missing" for name in before if name not in now]
    wrong += [f"{name} is not known" for name in now if name not in before]
    wrong += [
        f"{name} is {list(now[name])} and was {list(shape)}"
        for name, shape in before.items()
        if now.get(name, shape) != shape
    ]
    if wrong:
        raise FailedPrecondition(
            f"{version} has other tensors than the previous version: {named(wrong, _MOST_NAMED)}",
            fix=_FIX,
            details=first_lines(wrong),
        )


def check_covered(
    unwritten: Mapping[str, int],
    parameters: Mapping[str, Any],
    version: object,
    spare: Callable[[Any], int] = lambda _parameter: 0,
) -> None:
    """Refuse a version that leaves elements of a parameter without a value.

    Args:
        unwritten: elements that the loader does not write, by parameter.
        parameters: the engine's parameters, by name.
        version: what to call it.
        spare: number of elements of a parameter that may stay unwritten, such as padding.

    Raises:
        FailedPrecondition: names the parameters.
    """
    empty = [
        f"{name}: {left} of {parameter.numel()} elements"
        for name, parameter in parameters.items()
        if (left := unwritten.get(name, 0)) and left > spare(parameter)
    ]
    if empty:
        raise FailedPrecondition(
            f"{version} has nothing for {named(empty, _MOST_NAMED)}", fix=_FIX, details=first_lines(empty)
        )


def unseen(model: Any, recording: lazy.Recording, seen: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of a model whose values cannot be derived from a version's bytes, by name, with the reason.

    Args:
        model: a `torch.nn.Module`.
        recording: recording of its loader.
        seen: the parameters whose values can be derived.
    """
    there = {id(tensor) for tensor in seen.values()}
    found = dict.fromkeys(
        recording.targets.keys() - seen.keys(), "the engine computes with a tensor that is derived from it"
    )
    filled = {
        name: f"a version does not write {recording.unwritten[name]} of its elements"
        for name in seen
        if recording.unwritten.get(name)
    }
    others = {
        name: "no copy of it into the model was recorded"
        for name, parameter in model.named_parameters()
        if id(parameter) not in there and name not in found
    }
    return {**found, **filled, **others}
