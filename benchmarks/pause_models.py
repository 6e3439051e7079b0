"""Models of `benchmarks.pause`: their shapes, what an engine makes of their tensors, and checksums of parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

MODEL = "bench/pause"

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": True,
    },
    "moe": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 384, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "tiny-moe": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""Configs by name; Qwen3's, in bf16."""

_CHUNK = 1 << 24


def config_of(name: str) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    found = dict(CONFIGS[name])
    kind = "Qwen3Moe" if "num_experts" in found else "Qwen3"
    return {
        **found,
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": "qwen3_moe" if "num_experts" in found else "qwen3",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, by name."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in (f"model.layers.{n}." for n in range(config["num_hidden_layers"])):
        attention = layer + "self_attn."
        found |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{attention}q_proj.weight": (q, hidden),
            f"{attention}k_proj.weight": (kv, hidden),
            f"{attention}v_proj.weight": (kv, hidden),
            f"{attention}o_proj.weight": (hidden, q),
            f"{attention}q_norm.weight": (head,),
            f"{attention}k_norm.weight": (head,),
        }
        if "num_experts" in config:
            found[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
            mlps = [(f"{layer}mlp.experts.{n}.", config["moe_intermediate_size"]) for n in range(config["num_experts"])]
        else:
            mlps = [(f"{layer}mlp.", config["intermediate_size"])]
        for mlp, inner in mlps:
            found |= {
                f"{mlp}gate_proj.weight": (inner, hidden),
                f"{mlp}up_proj.weight": (inner, hidden),
                f"{mlp}down_proj.weight": (hidden, inner),
            }
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def write_model(folder: Path, name: str) -> tuple[Path, int]:
    """The folder ``hf``, made in a folder, with the files of a model; and the bytes of its weights."""
    config = config_of(name)
    made = folder / "hf"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made, 2 * sum(math.prod(shape) for shape in shapes_of(config).values())


def fused(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that an engine makes of them, one at a time."""
    for name, tensor in tensors.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "q_proj":
            yield (
                f"{layer}.qkv_proj.weight",
                torch.cat([tensors[f"{layer}.{each}_proj.weight"] for each in "qkv"]),
            )
        elif ".experts." in name:
            experts = layer.rpartition(".")[0]
            if layer.endswith(".experts.0") and kind == "gate_proj":
                all_of_them = [f"{experts}.{n}" for n in range(config["num_experts"])]
                yield (
                    f"{experts}.w13_weight",
                    torch.stack(
                        [
                            torch.cat([tensors[f"{each}.gate_proj.weight"], tensors[f"{each}.up_proj.weight"]])
                            for each in all_of_them
                        ]
                    ),
                )
                yield (
                    f"{experts}.w2_weight",
                    torch.stack([tensors[f"{each}.down_proj.weight"] for each in all_of_them]),
                )
        elif kind == "gate_proj":
            both = [tensors[f"{layer}.gate_proj.weight"], tensors[f"{layer}.up_proj.weight"]]
            yield f"{layer}.gate_up_proj.weight", torch.cat(both)
        elif kind not in ("k_proj", "v_proj", "up_proj"):
            yield name, tensor


def rank_name(rank: int, name: str) -> str:
    """The name of a parameter of a worker in what is compared."""
    return f"{rank}:{name}" if rank else name


def rank_parts(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that the tensor-parallel workers of an engine make of them: rows or columns of each weight in
    equal parts, norms and routers whole.
    """
    for rank in range(ranks):

        def part(name: str, tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            kind = name.removesuffix(".weight").rpartition(".")[2]
            if kind.endswith("norm") or kind == "gate" or ranks == 1:
                return tensor
            return tensor.chunk(ranks, 1 if kind in ("o_proj", "down_proj") else 0)[rank]

        cut = {name: part(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in fused(config, cut):
            yield rank_name(rank, name), tensor


def checksum(tensor: torch.Tensor) -> int:
    """A number that depends on each element of a 16-bit tensor and on where it is."""
    flat = tensor.detach().contiguous().view(-1).view(torch.int16)
    weights = torch.arange(1, min(_CHUNK, len(flat)) + 1, device=flat.device) % 65521 + 1
    found = 0
    for index, chunk in enumerate(torch.split(flat, _CHUNK)):
        found = (found * 31 + (index + 1) * int((chunk.to(torch.int64) * weights[: len(chunk)]).sum())) % (1 << 61)
    return found


def checksums(model: torch.nn.Module) -> dict[str, int]:
    """Checksums of an engine's parameters, by name."""
    return {name.replace(".routed_experts", ""): checksum(each) for name, each in model.named_parameters()}
