"""Families whose models exist in Megatron-Bridge alone: what ranks hold of them, by its published conventions.

Of Megatron-Bridge (``src/megatron/bridge/models``) this follows the names of modules and what becomes of each of
Hugging Face's tensors; of megatron-core 0.16 the cuts. A model of transformers stands beside each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.held_tensors import (
    DENSE,
    EXPERTS,
    TEXT,
    VISION,
    Cut,
    Grid,
    Held,
    Weights,
    by_projection,
    ends,
    gate_up,
    interleaved,
)

OfLayer = Mapping[str, tuple[Tensor, Cut]]
NO_NUMBER = Held("", torch.empty(0))


def attention(weights: Weights, there: str, groups: int = 4) -> dict[str, tuple[Tensor, Cut]]:
    """Attention and the norm in front of it, with the biases and norms that there are."""
    found: dict[str, tuple[Tensor, Cut]] = {
        "self_attention.linear_qkv.weight": (
            by_projection(weights, f"{there}.self_attn", "weight", groups),
            "rows",
        ),
        "self_attention.linear_proj.weight": (weights[f"{there}.self_attn.o_proj.weight"], "columns"),
        "self_attention.linear_qkv.layer_norm_weight": (weights[f"{there}.input_layernorm.weight"], "whole"),
    }
    if f"{there}.self_attn.q_proj.bias" in weights:
        bias = by_projection(weights, f"{there}.self_attn", "bias", groups)
        found["self_attention.linear_qkv.bias"] = bias, "rows"
    if f"{there}.self_attn.o_proj.bias" in weights:
        found["self_attention.linear_proj.bias"] = weights[f"{there}.self_attn.o_proj.bias"], "whole"
    for part in "qk":
        if f"{there}.self_attn.{part}_norm.weight" in weights:
            norm = weights[f"{there}.self_attn.{part}_norm.weight"]
            found[f"self_attention.{part}_layernorm.weight"] = norm, "whole"
    return found


def dense_mlp(weights: Weights, there: str) -> dict[str, tuple[Tensor, Cut]]:
    """An MLP with a gate, and the norm in front of it."""
    return {
        "mlp.linear_fc1.layer_norm_weight": (weights[f"{there}.post_attention_layernorm.weight"], "whole"),
        "mlp.linear_fc1.weight": (gate_up(weights, f"{there}.mlp"), "halves"),
        "mlp.linear_fc2.weight": (weights[f"{there}.mlp.down_proj.weight"], "columns"),
    }


def under(prefix: str, of_layer: OfLayer, common: Held) -> Iterator[Held]:
    for name, (data, cut) in of_layer.items():
        yield replace(common, key=f"{prefix}{name}", data=data, cut=cut)


# -- Qwen3-VL ------------------------------------------------------------------------------------------------------------


def qwen3_vl(weights: Weights) -> Iterator[Held]:
    """The dense one."""
    there = "model.language_model"
    yield from ends(weights, f"{there}.embed_tokens.weight", f"{there}.norm.weight", "lm_head.weight")
    for layer in range(4):
        of_layer = attention(weights, f"{there}.layers.{layer}") | dense_mlp(weights, f"{there}.layers.{layer}")
        yield from under("language_model.decoder.layers.{}.", of_layer, replace(NO_NUMBER, layer=(layer, 4)))
    yield from qwen3_tower(weights)


def qwen3_vl_moe(weights: Weights) -> Iterator[Held]:
    """The mixture of experts; layers without experts make Megatron-core give each layer its own key."""
    there = "model.language_model"
    yield from ends(weights, f"{there}.embed_tokens.weight", f"{there}.norm.weight", "lm_head.weight")
    routers = [f"{there}.layers.{layer}.mlp.gate.weight" for layer in range(4)]
    for layer, router in enumerate(routers):
        of_layer = f"{there}.layers.{layer}"
        common = replace(NO_NUMBER, layer=(layer, 4), stacked=all(router in weights for router in routers))
        here = "language_model.decoder.layers.{}."
        if router not in weights:
            yield from under(here, attention(weights, of_layer) | dense_mlp(weights, of_layer), common)
            continue
        moe: OfLayer = {
            "pre_mlp_layernorm.weight": (weights[f"{of_layer}.post_attention_layernorm.weight"], "whole"),
            "mlp.router.weight": (weights[router], "whole"),
        }
        yield from under(here, {**attention(weights, of_layer), **moe}, common)
        stacks = [weights[f"{of_layer}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")]
        for expert, (fc1, fc2) in enumerate(zip(*stacks, strict=True)):
            matrices: OfLayer = {
                "linear_fc1.weight": (fc1.t(), "halves"),
                "linear_fc2.weight": (fc2.t(), "columns"),
            }
            one = replace(common, expert=(expert, len(stacks[0])))
            yield from under(f"{here}mlp.experts.experts.", matrices, one)
    yield from qwen3_tower(weights)


def qwen3_tower(weights: Weights) -> Iterator[Held]:
    first = replace(NO_NUMBER, stage="first")
    here, there = "vision_model.", "model.visual."
    parts = ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
    yield from under(here, {part: (weights[there + part], "whole") for part in parts}, first)
    yield from under(f"{here}merger.", qwen3_merger(weights, f"{there}merger"), first)
    for index in range(2):
        merger = qwen3_merger(weights, f"{there}deepstack_merger_list.{index}")
        yield from under(f"{here}decoder.deepstack_merger_list.{{}}.", merger, replace(first, layer=(index, 2)))
    for block in range(3):
        of_block: dict[str, tuple[Tensor, Cut]] = {}
        in_block = f"{there}blocks.{block}"
        for kind in ("weight", "bias"):
            qkv = weights[f"{in_block}.attn.qkv.{kind}"].chunk(3)
            weight = kind == "weight"
            of_block |= {
                f"self_attention.linear_qkv.{kind}": (interleaved(*qkv, 4), "rows"),
                f"self_attention.linear_proj.{kind}": (
                    weights[f"{in_block}.attn.proj.{kind}"],
                    "columns" if weight else "whole",
                ),
                f"self_attention.linear_qkv.layer_norm_{kind}": (
                    weights[f"{in_block}.norm1.{kind}"],
                    "whole",
                ),
                f"mlp.linear_fc1.layer_norm_{kind}": (weights[f"{in_block}.norm2.{kind}"], "whole"),
                f"mlp.linear_fc1.{kind}": (weights[f"{in_block}.mlp.linear_fc1.{kind}"], "rows"),
                f"mlp.linear_fc2.{kind}": (
                    weights[f"{in_block}.mlp.linear_fc2.{kind}"],
                    "columns" if weight else "whole",
                ),
            }
        yield from under(f"{here}decoder.layers.{{}}.", of_block, replace(first, layer=(block, 3)))


def qwen3_merger(weights: Weights, there: str) -> OfLayer:
    return {
        "patch_norm.weight": (weights[f"{there}.norm.weight"], "whole"),
        "patch_norm.bias": (weights[f"{there}.norm.bias"], "whole"),
        "linear_fc1.weight": (weights[f"{there}.linear_fc1.weight"], "rows"),
        "linear_fc1.bias": (weights[f"{there}.linear_fc1.bias"], "rows"),
        "linear_fc2.weight": (weights[f"{there}.linear_fc2.weight"], "columns"),
        "linear_fc2.bias": (weights[f"{there}.linear_fc2.bias"], "whole"),
    }


def qwen3_vl_model(kind: str, tied: bool = False, **text: Any) -> Any:
    pictures = {"depth": 3, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision = {**VISION, **pictures, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    fields = {**TEXT, "head_dim": 16, "tie_word_embeddings": tied, "rope_scaling": rope, **text}
    config = getattr(transformers, f"{kind}Config")(text_config=fields, vision_config=vision, tie_word_embeddings=tied)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


# -- GLM-4.5V ------------------------------------------------------------------------------------------------------------


def glm4v_moe(weights: Weights) -> Iterator[Held]:
    """Its layers have keys of their own, for Megatron-Bridge lists which of them have experts; the tower is
    transformers'.
    """
    there, here = "model.language_model", "language_model.decoder.layers.{}."
    yield from ends(weights, f"{there}.embed_tokens.weight", f"{there}.norm.weight", "lm_head.weight")
    for layer in range(4):
        of_layer = f"{there}.layers.{layer}"
        common = replace(NO_NUMBER, layer=(layer, 4), stacked=False)
        yield from under(here, attention(weights, of_layer), common)
        if layer == 0:
            yield from under(here, dense_mlp(weights, of_layer), common)
            continue
        mlp = f"{of_layer}.mlp"
        shared = f"{mlp}.shared_experts"
        moe: OfLayer = {
            "pre_mlp_layernorm.weight": (weights[f"{of_layer}.post_attention_layernorm.weight"], "whole"),
            "mlp.router.weight": (weights[f"{mlp}.gate.weight"], "whole"),
            "mlp.router.expert_bias": (weights[f"{mlp}.gate.e_score_correction_bias"], "whole"),
            "mlp.shared_experts.linear_fc1.weight": (gate_up(weights, shared), "halves"),
            "mlp.shared_experts.linear_fc2.weight": (weights[f"{shared}.down_proj.weight"], "columns"),
        }
        yield from under(here, moe, common)
        for expert in range(8):
            matrices: OfLayer = {
                "linear_fc1.weight": (gate_up(weights, f"{mlp}.experts.{expert}"), "halves"),
                "linear_fc2.weight": (weights[f"{mlp}.experts.{expert}.down_proj.weight"], "columns"),
            }
            yield from under(f"{here}mlp.experts.experts.", matrices, replace(common, expert=(expert, 8)))
    for name, tensor in weights.items():
        if name.startswith("model.visual."):
            yield Held(name.removeprefix("model."), tensor, stage="first")


def glm4v_moe_model(tied: bool = False) -> Any:
    pictures = {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "image_size": 28, "patch_size": 14}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 48,
    }
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    fields = {**TEXT, **experts, "head_dim": 16, "tie_word_embeddings": tied, "rope_scaling": rope}
    config = transformers.Glm4vMoeConfig(
        text_config=fields, vision_config={**VISION, **pictures}, tie_word_embeddings=tied
    )
    return transformers.Glm4vMoeForConditionalGeneration(config)


# -- Nemotron-H ----------------------------------------------------------------------------------------------------------


def nemotron_h(weights: Weights) -> Iterator[Held]:
    """A layer of each kind, of which Megatron-core's `MambaStack` gives each its own keys, and sections of a state
    space model theirs.
    """
    here, there = "decoder.layers.{}.", "backbone.layers"
    layers = [replace(NO_NUMBER, layer=(layer, 4), stacked=False) for layer in range(4)]
    norms = [weights[f"{there}.{layer}.norm.weight"] for layer in range(4)]
    yield Held("embedding.word_embeddings.weight", weights["backbone.embeddings.weight"], "rows", stage="first")
    yield Held("decoder.final_norm.weight", weights["backbone.norm_f.weight"], stage="last")
    yield Held("output_layer.weight", weights["lm_head.weight"], "rows", stage="last")

    mixer = f"{there}.0.mixer"
    inner, states, heads = NEMOTRON_INNER, NEMOTRON_STATES, NEMOTRON["mamba_num_heads"]
    of_mamba: OfLayer = {
        **{name: (weights[f"{mixer}.{name}"], "rows") for name in ("A_log", "D", "dt_bias", "norm.weight")},
        "in_proj.layer_norm_weight": (norms[0], "whole"),
        "out_proj.weight": (weights[f"{mixer}.out_proj.weight"], "columns"),
    }
    projected = weights[f"{mixer}.in_proj.weight"].split([inner, inner, states, states, heads])
    sections = {
        f"in_proj.weight.{name}": part for name, part in zip(("z", "x", "B", "C", "dt"), projected, strict=True)
    }
    for kind in ("weight", "bias"):
        channels = weights[f"{mixer}.conv1d.{kind}"].split([inner, states, states])
        sections |= {f"conv1d.{kind}.{name}": part for name, part in zip("xBC", channels, strict=True)}
    cut_by_section: OfLayer = {name: (part, "rows") for name, part in sections.items()}
    yield from under(f"{here}mixer.", {**of_mamba, **cut_by_section}, layers[0])

    mixer = f"{there}.1.mixer"
    moe: OfLayer = {
        "pre_mlp_layernorm.weight": (norms[1], "whole"),
        "mlp.router.weight": (weights[f"{mixer}.gate.weight"], "whole"),
        "mlp.router.expert_bias": (weights[f"{mixer}.gate.e_score_correction_bias"], "whole"),
        **{
            f"mlp.{name}": (weights[f"{mixer}.{name}"], "whole")
            for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight")
            if f"{mixer}.{name}" in weights
        },
    }
    yield from under(here, moe, layers[1])
    yield from under(f"{here}mlp.shared_experts.", plain_mlp(weights, f"{mixer}.shared_experts"), layers[1])
    for expert in range(8):
        one = replace(layers[1], expert=(expert, 8))
        yield from under(f"{here}mlp.experts.experts.", plain_mlp(weights, f"{mixer}.experts.{expert}"), one)

    mixer = f"{there}.2.mixer"
    of_attention: OfLayer = {
        "linear_qkv.layer_norm_weight": (norms[2], "whole"),
        "linear_qkv.weight": (by_projection(weights, mixer, "weight", 4), "rows"),
        "linear_proj.weight": (weights[f"{mixer}.o_proj.weight"], "columns"),
    }
    yield from under(f"{here}self_attention.", of_attention, layers[2])
    of_mlp = {**plain_mlp(weights, f"{there}.3.mixer"), "linear_fc1.layer_norm_weight": (norms[3], "whole")}
    yield from under(f"{here}mlp.", of_mlp, layers[3])


def plain_mlp(weights: Weights, there: str) -> dict[str, tuple[Tensor, Cut]]:
    """An MLP without a gate."""
    return {
        "linear_fc1.weight": (weights[f"{there}.up_proj.weight"], "rows"),
        "linear_fc2.weight": (weights[f"{there}.down_proj.weight"], "columns"),
    }


NEMOTRON: dict[str, Any] = {
    **{name: size for name, size in TEXT.items() if name != "num_hidden_layers"},
    "hybrid_override_pattern": "ME*-",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 6,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
NEMOTRON_INNER, NEMOTRON_STATES = 8 * 12, 4 * 6


def nemotron_h_model(latent: int | None = None) -> Any:
    """transformers' own where it knows the type."""
    if "nemotron_h" in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING["nemotron_h"](**NEMOTRON, moe_latent_size=latent)
        return transformers.AutoModelForCausalLM.from_config(config).float()
    from tests.support.later_models import NemotronH, NemotronHConfig

    return NemotronH(NemotronHConfig(**NEMOTRON, moe_latent_size=latent))


# -- Qwen3-Next ----------------------------------------------------------------------------------------------------------


def qwen3_next(weights: Weights) -> Iterator[Held]:
    """Gated delta nets and one layer of gated attention; layers have keys of their own
    (``hetereogenous_dist_checkpoint``).
    """
    yield from ends(weights, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "")
    for layer in range(4):
        there, common = f"model.layers.{layer}", replace(NO_NUMBER, layer=(layer, 4), stacked=False)
        of_attention = gated_attention(weights, there) if layer == 3 else delta_net(weights, there)
        yield from qwen3_next_layer(weights, there, "decoder.layers.{}.", of_attention, common)
    if "mtp.fc.weight" not in weights:
        return
    last = replace(NO_NUMBER, stage="last")
    of_layer: OfLayer = {
        "eh_proj.weight": (weights["mtp.fc.weight"], "rows"),
        "enorm.weight": (weights["mtp.pre_fc_norm_embedding.weight"], "whole"),
        "hnorm.weight": (weights["mtp.pre_fc_norm_hidden.weight"], "whole"),
        "final_layernorm.weight": (weights["mtp.norm.weight"], "whole"),
    }
    yield from under("mtp.layers.0.", of_layer, last)
    here, there = "mtp.layers.0.transformer_layer.", "mtp.layers.0"
    yield from qwen3_next_layer(weights, there, here, gated_attention(weights, there), last)


def qwen3_next_layer(weights: Weights, there: str, here: str, of_attention: OfLayer, common: Held) -> Iterator[Held]:
    mlp = f"{there}.mlp"
    shared = f"{mlp}.shared_expert"
    moe: OfLayer = {
        "pre_mlp_layernorm.weight": (weights[f"{there}.post_attention_layernorm.weight"], "whole"),
        "mlp.router.weight": (weights[f"{mlp}.gate.weight"], "whole"),
        "mlp.shared_experts.gate_weight": (weights[f"{shared}_gate.weight"], "whole"),
        "mlp.shared_experts.linear_fc1.weight": (gate_up(weights, shared), "halves"),
        "mlp.shared_experts.linear_fc2.weight": (weights[f"{shared}.down_proj.weight"], "columns"),
    }
    yield from under(here, {**of_attention, **moe}, common)
    for expert in range(8):
        matrices: OfLayer = {
            "linear_fc1.weight": (gate_up(weights, f"{mlp}.experts.{expert}"), "halves"),
            "linear_fc2.weight": (weights[f"{mlp}.experts.{expert}.down_proj.weight"], "columns"),
        }
        one = replace(common, expert=(expert, 8))
        yield from under(f"{here}mlp.experts.experts.", matrices, one)


def gated_attention(weights: Weights, there: str) -> dict[str, tuple[Tensor, Cut]]:
    """For each of four key-value heads its two query heads, their gates, its key and its value."""
    heads = weights[f"{there}.self_attn.q_proj.weight"].split(16)  # of each head the query, and the gate
    keys, values = (weights[f"{there}.self_attn.{part}_proj.weight"].split(16) for part in "kv")
    qkv = [
        each
        for group in range(4)
        for each in (*heads[4 * group : 4 * group + 4 : 2], *heads[4 * group + 1 : 4 * group + 4 : 2], keys[group], values[group])
    ]  # fmt: skip
    return {**attention(weights, there), "self_attention.linear_qkv.weight": (torch.cat(qkv), "rows")}


def delta_net(weights: Weights, there: str) -> dict[str, tuple[Tensor, Cut]]:
    """A gated delta net, whose projections have a key for each of what they make."""
    attn = f"{there}.linear_attn"
    sizes = {
        "qkvz": (12, 12, 40, 40),
        "ba": (2, 2),
    }  # rows for each of four key heads, with two value heads each
    by_head = {
        kind: [head.split(sizes[kind]) for head in weights[f"{attn}.in_proj_{kind}.weight"].chunk(4)] for kind in sizes
    }
    names = {"qkvz": ("query", "key", "value", "z"), "ba": ("beta", "alpha")}
    sections = {
        f"in_proj.weight.{name}": torch.cat([head[index] for head in by_head[kind]])
        for kind in sizes
        for index, name in enumerate(names[kind])
    }
    channels = weights[f"{attn}.conv1d.weight"].split([48, 48, 160])
    sections |= {f"conv1d.weight.{name}": part for name, part in zip(("query", "key", "value"), channels, strict=True)}
    return {
        **{f"self_attention.{name}": (part, "rows") for name, part in sections.items()},
        **{f"self_attention.{name}": (weights[f"{attn}.{name}"], "rows") for name in ("A_log", "dt_bias")},
        "self_attention.in_proj.layer_norm_weight": (weights[f"{there}.input_layernorm.weight"], "whole"),
        "self_attention.out_norm.weight": (weights[f"{attn}.norm.weight"] - 1, "whole"),
        "self_attention.out_proj.weight": (weights[f"{attn}.out_proj.weight"], "columns"),
    }


QWEN3_NEXT: dict[str, Any] = {
    **TEXT,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}


def qwen3_next_model(predicting: bool = False) -> Any:
    """transformers' own; with a layer for multi-token prediction, of which it knows no more than that it is to be left
    out.
    """
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**QWEN3_NEXT)).float()
    if predicting:
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        inside = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**QWEN3_NEXT, **one}))
        mtp = torch.nn.Module()
        mtp.fc = torch.nn.Linear(2 * TEXT["hidden_size"], TEXT["hidden_size"], bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            mtp.add_module(name, type(model.model.norm)(TEXT["hidden_size"]))
        mtp.layers = inside.model.layers
        model.mtp = mtp.float()
    return model


QWEN3_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

PUBLISHED: dict[str, tuple[Callable[[], Any], Callable[[Weights], Iterator[Held]], list[Grid]]] = {
    "qwen3_vl": (lambda: qwen3_vl_model("Qwen3VL"), qwen3_vl, DENSE),
    "qwen3_vl-tied": (lambda: qwen3_vl_model("Qwen3VL", tied=True), qwen3_vl, DENSE),
    "qwen3_vl_moe": (lambda: qwen3_vl_model("Qwen3VLMoe", **QWEN3_EXPERTS), qwen3_vl_moe, EXPERTS),
    "qwen3_vl_moe-sparse": (
        lambda: qwen3_vl_model("Qwen3VLMoe", **QWEN3_EXPERTS, mlp_only_layers=[1]),
        qwen3_vl_moe,
        EXPERTS,
    ),
    "glm4v_moe": (glm4v_moe_model, glm4v_moe, EXPERTS),
    "glm4v_moe-tied": (lambda: glm4v_moe_model(tied=True), glm4v_moe, EXPERTS),
    "nemotron_h": (nemotron_h_model, nemotron_h, EXPERTS),
    "nemotron_h-latent": (lambda: nemotron_h_model(latent=32), nemotron_h, EXPERTS),
    "qwen3_next-decoder": (qwen3_next_model, qwen3_next, EXPERTS),
    "qwen3_next-predicting": (lambda: qwen3_next_model(predicting=True), qwen3_next, EXPERTS),
}
