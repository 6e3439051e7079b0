"""Comparison of a config with the trainer's arguments in a checkpoint, for differences between models that tensor
shapes do not show. All functions are pure.

A model with 4 heads and a model with 8 heads of half the size have tensors of the same shapes, but with rows in a
different order. Values such as the rotary base do not appear in any tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weighbridge._core.text.counts import counted
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridges import parse_config

_ALIKE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("num_attention_heads", ("num_attention_heads",)),
    ("norm_epsilon", ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")),
    ("rotary_percent", ("partial_rotary_factor",)),
    ("linear_num_key_heads", ("linear_num_key_heads",)),
    ("linear_num_value_heads", ("linear_num_value_heads",)),
    ("linear_key_head_dim", ("linear_key_head_dim",)),
    ("linear_value_head_dim", ("linear_value_head_dim",)),
    ("mamba_num_heads", ("mamba_num_heads",)),
    ("mamba_head_dim", ("mamba_head_dim",)),
    ("mamba_num_groups", ("n_groups",)),
    ("mamba_state_dim", ("ssm_state_size",)),
)
"""Arguments of Megatron-LM, each with fields of configs that must have the same value if both are set."""
_LATENT = (
    ("qk_head_dim", ("qk_nope_head_dim",)),
    ("qk_pos_emb_head_dim", ("qk_rope_head_dim",)),
    ("v_head_dim", ("v_head_dim",)),
    ("kv_lora_rank", ("kv_lora_rank",)),
)
"""Further pairs for multi-latent attention."""
_ROUTED = (("moe_router_topk", ("num_experts_per_tok", "moe_k")),)
"""Further pairs for experts."""


def check_trained(config_json: bytes, arguments: Mapping[str, Any]) -> None:
    """Check that a config belongs to the model that was trained.

    Args:
        config_json: the config.
        arguments: arguments of the trainer, by Megatron-LM's names; missing arguments are not compared.

    Raises:
        InvalidArgument: the config contradicts the arguments. The error names each field.
    """
    config = parse_config(config_json)
    problems = contradictions(config, arguments)
    if problems:
        raise InvalidArgument(
            (
                "config.json does not describe the model that was trained: it contradicts "
                f"{counted(len(problems), 'argument')} stored in the checkpoint"
            ),
            details=problems,
            fix="give the config.json that belongs to the checkpoint (--config)",
        )


def contradictions(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Contradictions between a config and a trainer's arguments, each as a message."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    rope = text.get("rope_parameters")
    if isinstance(rope, Mapping):  # transformers 5
        text |= {name: value for name, value in rope.items() if text.get(name) is None}
    compared = list(_ALIKE)
    said = dict(arguments)
    if arguments.get("multi_latent_attention"):
        compared += _LATENT
    else:
        compared += [("kv_channels", ("head_dim",)), ("num_query_groups", ("num_key_value_heads",))]
        heads, hidden = _number(text.get("num_attention_heads")), _number(text.get("hidden_size"))
        if text.get("head_dim") is None and heads and hidden:
            text["head_dim"] = hidden // heads
        if text.get("num_key_value_heads") is None:
            text["num_key_value_heads"] = heads
        if not arguments.get("group_query_attention"):
            said["num_query_groups"] = arguments.get("num_attention_heads")
    if arguments.get("num_experts"):
        compared += _ROUTED
    if arguments.get("position_embedding_type", "rope") == "rope":
        compared.append(("rotary_base", ("rope_theta",)))
    problems = []
    for argument, fields in compared:
        trained = _number(said.get(argument))
        here = next(((name, n) for name in fields if (n := _number(text.get(name))) is not None), None)
        if here and trained is not None and not math.isclose(here[1], trained, rel_tol=1e-6):
            problems.append(f"{here[0]} is {here[1]:g} here, and the trainer had {argument}={trained:g}")
    return problems


def _number(value: Any) -> float | None:
    if type(value) not in (int, float):
        return None
    try:
        return float(value)
    except OverflowError:  # integers in JSON may have any length
        return math.inf
