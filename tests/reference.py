"""What is the right answer? Small models, and a loader for Megatron that shares no code with Weighbridge.

`load_with_mbridge` is the slow and obvious way: make the whole tensor as Megatron would store it, cut out
what this rank says it holds, copy it in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformers import PretrainedConfig, PreTrainedModel

TINY_FAMILIES = ("llama", "llama_bias", "qwen2", "qwen3")
"""Families of `tiny_config`; `llama_bias` is llama with `attention_bias`."""


def tiny_config(family: str, *, tied: bool, **overrides: Any) -> PretrainedConfig:
    """A configuration of a few hundred kilobytes in float32 that divides by TP 1, 2, 4 and PP 1, 2, 4.

    Args:
        family: one of `TINY_FAMILIES`.
        tied: whether the output layer is the embedding.
        overrides: fields of the configuration to replace.
    """
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        # Not the defaults, so that a loader or a model that ignores them is found out.
        "rms_norm_eps": 1e-4,
        "rope_theta": 5000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    match family:
        case "llama":
            return LlamaConfig(**{**fields, **overrides})
        case "llama_bias":
            return LlamaConfig(**{**fields, "attention_bias": True, **overrides})
        case "qwen2":
            return Qwen2Config(**{**fields, **overrides})
        case "qwen3":
            # Twice hidden_size / num_attention_heads: projections are not square.
            return Qwen3Config(**{**fields, "head_dim": 16, **overrides})
    raise ValueError(f"family {family!r} is not one of {', '.join(TINY_FAMILIES)}")


def tiny_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model in which every parameter is random, norms and biases too: none can pass for another."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Vectors are norms and biases; both are of the order of one half to two.
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.1 * noise)
    return model


def load_with_mbridge(
    megatron_model: GPTModel, hf_state_dict: Mapping[str, Tensor], hf_config: PretrainedConfig
) -> None:
    """Fill one rank's Megatron model from a whole Hugging Face state dict; vocabulary padding becomes zeros.

    Args:
        megatron_model: this rank's stage, of any TP, PP and DP; process groups are initialised.
        hf_state_dict: full tensors by Hugging Face names, in the model's dtype.
        hf_config: the configuration that both were made from.

    Raises:
        AssertionError: some element of a parameter was not written.
    """
    bridge = make_bridge(hf_config, next(megatron_model.parameters()).dtype)
    with torch.no_grad():
        for parameter in megatron_model.parameters():
            parameter.fill_(torch.nan)
        for shard in _shards(megatron_model):
            full = _full_mcore_tensor(bridge, shard, hf_state_dict)
            offset = shard.global_offset[shard.prepend_axis_num :]
            box = tuple(slice(o, o + n) for o, n in zip(offset, shard.local_shape, strict=True))
            shard.data.copy_(full[box])
        for name, parameter in megatron_model.named_parameters():
            assert not parameter.isnan().any(), f"{name} was not filled completely"


def _shards(megatron_model: GPTModel) -> Iterator[ShardedTensor]:
    """This rank's sharded tensors, SwiGLU factories built; their data are views of the parameters."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for entry in megatron_model.sharded_state_dict().values():
        if isinstance(entry, ShardedTensorFactory):
            yield from entry.build()
        elif isinstance(entry, ShardedTensor):
            yield entry


def _full_mcore_tensor(bridge: Any, shard: ShardedTensor, hf_state_dict: Mapping[str, Tensor]) -> Tensor:
    """The tensor of one layer that the shard is a part of, whole, without the prepended layer axis."""
    name = shard.key
    if shard.prepend_axis_num:
        name = name.replace("decoder.layers.", f"decoder.layers.{shard.global_offset[0]}.")
    hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
    full: Tensor = bridge._weight_to_mcore_format(name, [hf_state_dict[hf_name] for hf_name in hf_names])
    missing_rows = shard.global_shape[shard.prepend_axis_num] - full.shape[0]
    if missing_rows:
        assert name in ("embedding.word_embeddings.weight", "output_layer.weight"), name
        full = torch.cat([full, full.new_zeros(missing_rows, *full.shape[1:])])
    return full


def make_bridge(hf_config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A bridge that only maps names and tensors: no process groups, nothing shared with other bridges."""
    # mbridge takes seconds to import, and only ranks need it.
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge

    base: Any = {"llama": LLaMABridge, "qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge}[hf_config.model_type]

    class Bridge(base):  # type: ignore[misc]  # chosen at run time
        def __init__(self) -> None:
            # Tied Qwen bridges write into these, which belong to the class.
            self._DIRECT_MAPPING = copy.deepcopy(base._DIRECT_MAPPING)
            self._ATTENTION_MAPPING = copy.deepcopy(base._ATTENTION_MAPPING)
            self._MLP_MAPPING = copy.deepcopy(base._MLP_MAPPING)
            # mbridge knows no bias but that of QKV.
            layer = "model.layers.{layer_number}"
            self._ATTENTION_MAPPING["self_attention.linear_proj.bias"] = [f"{layer}.self_attn.o_proj.bias"]
            self._MLP_MAPPING["mlp.linear_fc1.bias"] = [
                f"{layer}.mlp.gate_proj.bias",
                f"{layer}.mlp.up_proj.bias",
            ]
            self._MLP_MAPPING["mlp.linear_fc2.bias"] = [f"{layer}.mlp.down_proj.bias"]
            super().__init__(hf_config, dtype=dtype, parallel_states=ParallelStates(vpp_size=None))

        def _build_config(self) -> SimpleNamespace:
            return SimpleNamespace(
                num_layers=hf_config.num_hidden_layers,
                mtp_num_layers=None,
                gated_linear_unit=True,
                num_moe_experts=None,
            )

    return Bridge()
