"""Reference answers: small models, and a loader for Megatron that shares no code with Weighbridge.

`load_with_mbridge` is the slow and obvious way: make the whole tensor as Megatron would store it, cut out
the box that this rank's sharded tensor describes, copy it in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformers import PretrainedConfig, PreTrainedModel

TINY_FAMILIES = ("llama", "llama_bias", "qwen2", "qwen3")
"""Families of `tiny_config` that the demo builds; `llama_bias` is llama with `attention_bias`."""

MORE_TINY_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_sparse", "glm4_moe", "glm4_moe_mtp"),
    *("deepseek_v3", "deepseek_v3_plain_q", "deepseek_v3_yarn", "deepseek_v3_mtp", "mimo"),
)
"""Families of `tiny_config` that `tests.support.megatron_families` builds.

Every second layer of `qwen3_moe_sparse` is dense; `_plain_q` has no `q_lora_rank`, `_yarn` scales RoPE as the
real DeepSeek-V3 does; `_mtp` and `mimo` have two layers of multi-token prediction.
"""


UNKNOWN_TO_MBRIDGE = (*("gpt_oss", "ernie4_5_moe", "minimax_m2", "deepseek_v32", "deepseek_v32_mtp", "qwen3_next"),)
"""Further families of `tiny_config` that `tests.support.megatron_families` builds: `load_with_mbridge` cannot fill
them.
"""


LATER = ("minimax_m2", "deepseek_v32")
"""Families that only transformers 5 knows: `tests.support.later_models` makes their models."""


class MimoConfig(Qwen2Config):  # type: ignore[misc]  # transformers is seen as untyped
    """MiMo, which transformers does not have: Qwen2 with layers of multi-token prediction."""

    model_type = "mimo"


_SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def tiny_config(family: str, *, tied: bool, **overrides: Any) -> PretrainedConfig:
    """A configuration of a few hundred kilobytes in float32 that divides by TP 1, 2, 4 and PP 1, 2, 4.

    Args:
        family: one of `TINY_FAMILIES`, `MORE_TINY_FAMILIES` or `UNKNOWN_TO_MBRIDGE`.
        tied: whether the output layer is the embedding.
        overrides: fields of the configuration to replace.
    """
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
        case "mimo":
            return MimoConfig(**{**fields, "num_nextn_predict_layers": 2, **overrides})
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return MixtralConfig(**{**fields, **experts, **overrides})
        case "qwen2_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            return Qwen2MoeConfig(**{**fields, **experts, "shared_expert_intermediate_size": 80, **overrides})
        case "qwen3_moe" | "qwen3_moe_sparse":
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            sparse = {"decoder_sparse_step": 2} if family == "qwen3_moe_sparse" else {}
            return Qwen3MoeConfig(
                **{**fields, **experts, **sparse, "head_dim": 16, "norm_topk_prob": True, **overrides}
            )
        case "gpt_oss":
            experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}
            # a window that is shorter than what tests compute
            rope = {"rope_scaling": None, "sliding_window": 4, "head_dim": 16}
            return GptOssConfig(**{**fields, **experts, **rope, **overrides})
        case "ernie4_5_moe":
            experts = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48}
            return Ernie4_5_MoeConfig(**{**fields, **experts, **overrides})
        case "minimax_m2":
            from tests.support.later_models import MinimaxM2Config

            experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}
            return MinimaxM2Config(**{**fields, **experts, "head_dim": 16, "rotary_dim": 8, **overrides})
        case "qwen3_next":
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            # key heads and value heads of other numbers and sizes
            linear = {
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 12,
                "linear_value_head_dim": 20,
            }
            more = {"shared_expert_intermediate_size": 80, "head_dim": 16, "num_nextn_predict_layers": 0}
            return Qwen3NextConfig(**{**fields, **experts, **linear, **more, **overrides})
        case "glm4_moe" | "glm4_moe_mtp":
            mtp = {"num_nextn_predict_layers": 2} if family == "glm4_moe_mtp" else {}
            return Glm4MoeConfig(
                **{**fields, **_SIGMOID_EXPERTS, **mtp},
                head_dim=16,
                partial_rotary_factor=0.5,
                use_qk_norm=True,
                attention_bias=True,
                **overrides,
            )
        case "deepseek_v3" | "deepseek_v3_plain_q" | "deepseek_v3_yarn" | "deepseek_v3_mtp":
            variants: dict[str, dict[str, Any]] = {
                "deepseek_v3_plain_q": {"q_lora_rank": None},
                "deepseek_v3_yarn": {"rope_scaling": dict(_YARN)},
                "deepseek_v3_mtp": {"num_nextn_predict_layers": 2},
            }
            variant = {"num_nextn_predict_layers": 0, **variants.get(family, {})}
            return DeepseekV3Config(**{**fields, **_SIGMOID_EXPERTS, **_LATENT, **variant, **overrides})
        case "deepseek_v32" | "deepseek_v32_mtp":
            from tests.support.later_models import DeepseekV32Config

            indexer = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 16}
            mtp = {"num_nextn_predict_layers": 2} if family == "deepseek_v32_mtp" else {}
            return DeepseekV32Config(**{**fields, **_SIGMOID_EXPERTS, **_LATENT, **indexer, **mtp, **overrides})
    families = (*TINY_FAMILIES, *MORE_TINY_FAMILIES, *UNKNOWN_TO_MBRIDGE)
    raise ValueError(f"family {family!r} is not one of {', '.join(families)}")


def tiny_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model in which every parameter is random, norms and biases too: none can pass for another.

    Expert biases of routers, which are buffers, are random as well.
    """
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    model: PreTrainedModel
    if config.model_type in LATER:
        from tests.support.later_models import later_model

        model = later_model(config)
    elif config.model_type == "mimo":
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    make_random(model.float().eval(), seed)
    return model


def tiny_value_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """As `tiny_model`, with a head to one number a token: `score.weight` and `score.bias`."""
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(config)
    config.num_labels = 1
    model: PreTrainedModel = AutoModelForTokenClassification.from_config(config, attn_implementation="eager")
    make_random(model.float().eval(), seed)
    return model


_UNLIKE = {
    "minimax_m2": "the tests make it of parts of transformers 4",
    "gemma3": "transformers 5 leaves a part of the names of a vision tower out that it has not loaded",
    "qwen3_vl_moe": "transformers 5 saves experts with other axes than published files have",
}
"""Families of which transformers 5 does not save the files that are published, by their first word."""


def skip_if_saved_otherwise(family: str) -> None:
    """Skip the test where the transformers that is installed saves the family otherwise than it is published
    (docs/families.md).
    """
    why = _UNLIKE.get(family.partition("-")[0])
    if why is not None and not transformers.__version__.startswith("4."):
        pytest.skip(why)


def in_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model by the names that they have in files: transformers 5 stacks experts in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ModuleNotFoundError:  # transformers 4
        return dict(tensors)
    return dict(revert_weight_conversion(model, dict(tensors)))


def make_random(module: torch.nn.Module, seed: int) -> None:
    """Replace all parameters and routers' expert biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Vectors are norms and biases; both are of the order of one half to two.
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.1 * noise)
            if name.endswith("linear_attn.norm.weight"):
                # Megatron-core has it less one: on this grid nothing is rounded on the way there and back.
                parameter.copy_((parameter * 32).round() / 32)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Positive, for transformers takes experts of groups not chosen for those of score 0.
                buffer.copy_(0.5 * torch.rand(buffer.shape, generator=generator))


class MtpReference(torch.nn.Module):
    """The layers of multi-token prediction that belong to a `tiny_model`, which transformers does not run.

    Each is, as in the DeepSeek-V3 report (2.2), a projection of the next token's embedding and the hidden
    state below, both normed, then a decoder layer of the model's own kind, a norm, and the model's output
    layer. MiMo's projection takes the two in the other order.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        config = model.config
        layer_class = type(model.model.layers[-1])
        norm_class = type(model.model.norm)
        self.hidden_first = config.model_type == "mimo"
        self.layers = torch.nn.ModuleList()
        for index in range(config.num_nextn_predict_layers):
            layer = layer_class(config, 0 if self.hidden_first else config.num_hidden_layers + index)
            for name in ("enorm", "hnorm", "last_norm"):
                layer.add_module(name, norm_class(config.hidden_size, eps=config.rms_norm_eps))
            layer.add_module("eh_proj", torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False))
            self.layers.append(layer)
        make_random(self.float().eval(), seed)

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Their weights by the names that published checkpoints have."""
        first = model.config.num_hidden_layers
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            prefix = f"model.mtp_layers.{index}." if self.hidden_first else f"model.layers.{first + index}."
            for name, tensor in layer.state_dict().items():
                part, _, rest = name.partition(".")
                table = _MIMO_MTP if self.hidden_first else _DEEPSEEK_MTP
                found[prefix + (f"{table[part]}.{rest}" if part in table else name)] = tensor
            if not self.hidden_first:
                # Published again with every layer, although they are those of the model.
                found[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
                found[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight.detach()
        return in_files(model, found)

    @torch.no_grad()
    def logits(self, model: PreTrainedModel, input_ids: Tensor) -> list[Tensor]:
        """`[batch, seq, vocab]` of each layer; tokens after the last one are zeros."""
        hidden = model.model(input_ids).last_hidden_state
        seq = input_ids.shape[1]
        positions = model.model.rotary_emb(hidden, torch.arange(seq)[None])
        mask = torch.full((1, 1, seq, seq), torch.finfo(torch.float32).min).triu(1)
        found = []
        layer: Any
        for layer in self.layers:
            input_ids = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))
            parts = [layer.enorm(model.get_input_embeddings()(input_ids)), layer.hnorm(hidden)]
            hidden = layer.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
            hidden = layer(hidden, position_embeddings=positions, attention_mask=mask)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            hidden = layer.last_norm(hidden)
            found.append(model.get_output_embeddings()(hidden))
        return found


_DEEPSEEK_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "last_norm": "shared_head.norm"}
_MIMO_MTP = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "last_norm": "final_layernorm",
}
"""Published names of a multi-token prediction layer's own parts, glm4_moe's being deepseek_v3's."""


def load_with_mbridge(
    megatron_model: GPTModel, hf_state_dict: Mapping[str, Tensor], hf_config: PretrainedConfig
) -> None:
    """Fill one rank's Megatron model from a whole Hugging Face state dict; vocabulary padding becomes zeros.

    Args:
        megatron_model: this rank's stage, of any parallelism; process groups are initialised.
        hf_state_dict: full tensors by Hugging Face names, in the model's dtype.
        hf_config: the configuration that both were made from.

    Raises:
        AssertionError: some element of a parameter was not written.
    """
    bridge = make_bridge(hf_config, next(megatron_model.parameters()).dtype)
    targets = dict(megatron_model.named_parameters())
    targets |= {name: buffer for name, buffer in megatron_model.named_buffers() if name.endswith(".expert_bias")}
    with torch.no_grad():
        for target in targets.values():
            target.fill_(torch.nan)
        for shard in _shards(megatron_model):
            full = _full_mcore_tensor(bridge, shard, hf_state_dict)
            offset = shard.global_offset[shard.prepend_axis_num :]
            box = tuple(slice(o, o + n) for o, n in zip(offset, shard.local_shape, strict=True))
            shard.data.copy_(full[box])
        for name, target in targets.items():
            assert not target.isnan().any(), f"{name} was not filled completely"


def _shards(megatron_model: GPTModel) -> Iterator[ShardedTensor]:
    """This rank's sharded tensors, SwiGLU factories built; their data are views of the parameters."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    # A stage with multi-token prediction fails without metadata, unlike all others.
    metadata = ensure_metadata_has_dp_cp_group(None)
    for entry in megatron_model.sharded_state_dict(metadata=metadata).values():
        if isinstance(entry, ShardedTensorFactory):
            yield from entry.build()
        elif isinstance(entry, ShardedTensor):
            yield entry


def _mcore_name(shard: ShardedTensor) -> str:
    """The name of one layer's (and one expert's) parameter as mbridge knows it, from a key and prepended axes."""
    name = str(shard.key)
    axes = list(shard.global_offset[: shard.prepend_axis_num])
    if not re.search(r"^(decoder|mtp)\.layers\.\d", name):
        name = name.replace("decoder.layers.", f"decoder.layers.{axes.pop(0)}." if axes else "decoder.layers.")
    if ".experts.experts." in name:
        name = name.replace(".experts.experts.", ".experts.") + str(axes.pop(0))
    assert not axes, f"{shard.key} has a prepended axis that is neither layer nor expert"
    return name


def _mtp_hf_names(bridge: Any, name: str) -> list[str]:
    """Hugging Face names of a multi-token prediction layer's parameter; mbridge only knows DeepSeek's 61 layers."""
    mimo = bridge.hf_config.model_type == "mimo"
    index, rest = name.removeprefix("mtp.layers.").split(".", 1)
    number = int(index) if mimo else bridge.hf_config.num_hidden_layers + int(index)
    if rest.startswith("transformer_layer."):
        inner = rest.removeprefix("transformer_layer.")
        names = bridge._weight_name_mapping_mcore_to_hf(f"decoder.layers.{number}.{inner}")
    else:
        part, leaf = rest.split(".")
        table = _MIMO_MTP if mimo else _DEEPSEEK_MTP
        names = [f"model.layers.{number}.{table[part.replace('final_layernorm', 'last_norm')]}.{leaf}"]
    return [n.replace("model.layers.", "model.mtp_layers.") if mimo else n for n in names]


def _full_mcore_tensor(bridge: Any, shard: ShardedTensor, hf_state_dict: Mapping[str, Tensor]) -> Tensor:
    """The tensor of one layer that the shard is a part of, whole, without the prepended axes."""
    name = _mcore_name(shard)
    if name.startswith("output_layer.") and "score.weight" in hf_state_dict:
        return hf_state_dict[name.replace("output_layer", "score")]
    hf_names = _mtp_hf_names(bridge, name) if name.startswith("mtp.") else bridge._weight_name_mapping_mcore_to_hf(name)
    full: Tensor = bridge._weight_to_mcore_format(name, [hf_state_dict[hf_name] for hf_name in hf_names])
    if name.endswith(".eh_proj.weight") and bridge.hf_config.model_type == "mimo":
        # MiMo's has the columns of the hidden state first, Megatron's those of the embedding.
        full = torch.cat(full.chunk(2, dim=1)[::-1], dim=1)
    missing_rows = shard.global_shape[shard.prepend_axis_num] - full.shape[0]
    if missing_rows:
        assert name in ("embedding.word_embeddings.weight", "output_layer.weight"), name
        full = torch.cat([full, full.new_zeros(missing_rows, *full.shape[1:])])
    return full


def make_bridge(hf_config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A bridge that only maps names and tensors: no process groups, nothing shared with other bridges."""
    # mbridge takes seconds to import, and only ranks need it.
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from mbridge.models.glm4moe import GLM4MoEBridge
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.mimo import MimoBridge
    from mbridge.models.mixtral import MixtralBridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen2moe import Qwen2MoEBridge
    from mbridge.models.qwen3 import Qwen3Bridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    bases: dict[str, Any] = {
        "llama": LLaMABridge,
        "qwen2": Qwen2Bridge,
        "qwen3": Qwen3Bridge,
        "mimo": MimoBridge,
        "mixtral": MixtralBridge,
        "qwen2_moe": Qwen2MoEBridge,
        "qwen3_moe": Qwen3MoEBridge,
        "glm4_moe": GLM4MoEBridge,
        "deepseek_v3": DeepseekV3Bridge,
    }
    base = bases[hf_config.model_type]
    if getattr(hf_config, "head_dim", 0) is None:
        # mbridge takes Mixtral's None for a size.
        hf_config = copy.deepcopy(hf_config)
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads

    class Bridge(base):  # type: ignore[misc, valid-type]  # chosen at run time
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
            # Nor, in Qwen's mixtures, layers that are dense.
            norm = [f"{layer}.post_attention_layernorm.weight"]
            gate_up = [f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"]
            self._MLP_MAPPING.setdefault("mlp.linear_fc1.layer_norm_weight", norm)
            self._MLP_MAPPING.setdefault("mlp.linear_fc1.weight", gate_up)
            self._MLP_MAPPING.setdefault("mlp.linear_fc2.weight", [f"{layer}.mlp.down_proj.weight"])
            if hf_config.model_type == "deepseek_v3":
                # Norms that the local spec keeps apart from the projections behind them.
                for name in ("q", "kv"):
                    self._ATTENTION_MAPPING[f"self_attention.{name}_layernorm.weight"] = [
                        f"{layer}.self_attn.{name}_a_layernorm.weight"
                    ]
            super().__init__(hf_config, dtype=dtype, parallel_states=ParallelStates(vpp_size=None))

        def _build_config(self) -> SimpleNamespace:
            return SimpleNamespace(
                num_layers=hf_config.num_hidden_layers,
                mtp_num_layers=None,
                gated_linear_unit=True,
                num_moe_experts=None,
            )

    return Bridge()
