"""Real megatron-core models of families that the demo does not know, built and run on CPU.

Mixtures of experts, multi-latent attention, multi-token prediction and value heads, with the local layer spec
(no Transformer Engine) and one `MLP` an expert (`SequentialMLP`). As in `weighbridge_demo.megatron_cpu`, a
parameter and its shard are what Megatron makes of them, and every function is collective.

Not here, because the local spec cannot build them faithfully: gemma3 (norms with zero-centred weights, norms
after attention and MLP, local and global attention in turns) and llama4 (attention in chunks).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from weighbridge_demo.megatron_cpu import Parallel, check_joined, common_config, rope_scaling, rotary_base

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mimo"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "ernie4_5_moe"),
    *("gpt_oss", "minimax_m2", "deepseek_v32", "qwen3_next"),
)
"""The `model_type`s that `build_family_model` knows."""

_DELTA_NET_NORM = "self_attention.in_proj.layer_norm_"
"""Key of the norm in front of a gated delta net, without its end: there is no layer spec that keeps it apart."""
_MLA_NORM_EPSILON = 1e-6
"""Epsilon of the norms inside attention in transformers' deepseek, whatever the value of `rms_norm_eps`."""


def _nothing() -> None:
    return None


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _window(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Mask of the keys that a token must not attend to, bool `[queries, keys]`.

    Megatron's own function makes it on CUDA.
    """
    behind = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    return (behind > window[0]) | (-behind > window[1])


class ValueHead(torch.nn.Linear):
    """Output layer that verl gives a critic; not cut by tensor parallelism."""

    def forward(  # type: ignore[override]  # called as Megatron's output layers are
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return super().forward(hidden).float(), None


class _LatentAttention(DotProductAttention):
    """Megatron's local attention, without parameters, for values narrower or wider than queries and keys.

    The local spec of multi-latent attention names a class that does not know these arguments.
    """

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        # Zeros, when ordinary attention makes one that latent attention then replaces.
        del k_channels
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class _NormOfAllHeads(torch.nn.Module):
    """A norm over the heads of all ranks together, of `[tokens, batch, heads of the rank, size of a head]`, which cuts
    its weights.
    """

    def __init__(self, heads: int, size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads * size // config.tensor_model_parallel_size))
        self.eps, self.size = eps, heads * size

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(-2)
        squares = flat.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return (flat * torch.rsqrt(squares / self.size + self.eps) * self.weight).view_as(hidden)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": metadata["dp_cp_group"],
        }
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)  # type: ignore[no-any-return]


class NormOfAllQueries(_NormOfAllHeads):
    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_attention_heads, hidden_size, config, eps)


class NormOfAllKeys(_NormOfAllHeads):
    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_query_groups, hidden_size, config, eps)


class NormAroundOne(torch.nn.Module):
    """A norm whose weights are offsets from one, as Transformer Engine's with ``layernorm_zero_centered_gamma``."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        squares = hidden.square().mean(-1, keepdim=True)
        return hidden * torch.rsqrt(squares + self.eps) * (1 + self.weight)


def _l2norm(hidden: Tensor) -> Tensor:
    """Same values as flash-linear-attention's kernel."""
    return hidden * torch.rsqrt(hidden.square().sum(-1, keepdim=True) + 1e-6)


def _with_delta_nets(block: Any, layers: Sequence[bool]) -> None:
    """Put gated delta nets in the place of attention in some layers, and norms around one everywhere.

    Megatron's own spec of these layers wants Transformer Engine for its linear layers and norms;
    flash-linear-attention, which it imports, and the memory of its parameters are for CUDA. Megatron has the same
    computation in torch, for runs that are to be deterministic.
    """
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = _l2norm
    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
    gated_delta_net.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    block.layer_norm = NormAroundOne
    block.layer_specs = [copy.deepcopy(spec) for spec in block.layer_specs]  # layers that are alike share theirs
    for spec, is_linear in zip(block.layer_specs, layers, strict=True):
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = NormAroundOne
        if is_linear:
            parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, NormAroundOne, RowParallelLinear)
            spec.submodules.self_attention = ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=parts)
            keys = spec.submodules.sharded_state_dict_keys_map
            spec.submodules.sharded_state_dict_keys_map = {**keys, "input_layernorm.": _DELTA_NET_NORM}
        else:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = NormAroundOne


class _Whole(torch.nn.Linear):
    """A linear layer that every rank has whole, made and called as Transformer Engine's: the local spec has none."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden), None


def _sparse_attention() -> ModuleSpec:
    """Megatron's sparse attention, of which it says that it needs Transformer Engine for linear layers alone."""
    # queries and keys are rotated alike by it, on CUDA and in bf16 only, and their products stay the same
    dsa.rotate_activation = _same
    linear = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), _Whole)
    submodules = dsa.DSAIndexerSubmodules(**linear, k_norm=WrappedTorchNorm)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=submodules)
    return ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))


def build_family_model(
    hf_config: PretrainedConfig,
    parallel: Parallel,
    *,
    dtype: torch.dtype = torch.float32,
    padded_vocab_size: int | None = None,
    vp_stage: int | None = None,
    names: Literal["local", "te"] = "local",
    value_head: Literal["none", "weight", "weight_and_bias"] = "none",
    **options: Any,
) -> GPTModel:
    """Make this rank's stage, with random weights, of the model that a Hugging Face configuration describes.

    Args:
        hf_config: configuration of one of `FAMILIES`. `num_nextn_predict_layers` adds layers of multi-token
            prediction to any of them.
        parallel: the parallelism that `init_rank` was called with.
        dtype: dtype of all parameters, norms included; the routers' expert biases stay float32.
        padded_vocab_size: rows of the embedding and of the output layer; `vocab_size` if None.
        vp_stage: number of the virtual stage, if `parallel.vpp` is set.
        names: "te" gives norms in `sharded_state_dict` the keys that Transformer Engine's fused layers have
            in the models of verl and slime; "local" leaves them as the local spec has them.
        value_head: replaces the output layer by a linear layer to one number a token; embeddings are then
            not tied.
        options: further fields of `TransformerConfig`, such as `num_layers_in_first_pipeline_stage`. With
            `moe_grouped_gemm=True` experts are Megatron's legacy `GroupedMLP`, which has a `sharded_state_dict`
            but cannot run on CPU.

    Raises:
        NotImplementedError: the configuration asks for something this cannot build faithfully.
        ValueError: `parallel` is not the job that this rank has joined.
    """
    check_joined(parallel)
    mtp_layers = getattr(hf_config, "num_nextn_predict_layers", None) or None
    tied = bool(hf_config.tie_word_embeddings) and value_head == "none"
    # `sharded_state_dict` of such a last stage fails an assertion: it has an output layer of its own after all.
    _refuse(mtp_layers and tied and parallel.pp > 1, "tied embeddings, multi-token prediction and stages")
    # Its import of Megatron's own wrappers succeeds without Transformer Engine, and leaves None for classes.
    multi_latent_attention.HAVE_TE = False
    # Only its forward needs the package.
    grouped_gemm_util.assert_grouped_gemm_is_available = _nothing
    fused_softmax.get_sliding_window_causal_mask = _window
    fields = {
        **common_config(hf_config, parallel, dtype),
        **_attention_fields(hf_config),
        **_expert_fields(hf_config, parallel),
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        # Not `context_parallel_size`: local attention refuses it. The process groups say who holds what.
        "mtp_num_layers": mtp_layers,
        **options,
    }
    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    config = config_class(**fields)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    mtp = None
    if config.mtp_num_layers is not None:
        # A stage without a decoder layer of its own takes the kind of layer from a model of one stage.
        kind = block if block.layer_specs else _last_layer_spec(config)
        mtp = get_gpt_mtp_block_spec(config, kind, use_transformer_engine=False, vp_stage=vp_stage)
    mtp_specs = [] if mtp is None else [spec.submodules.transformer_layer for spec in mtp.layer_specs]
    if hf_config.model_type == "qwen3_next":
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        kinds = hf_config.layer_types[first : first + len(block.layer_specs)]
        _with_delta_nets(block, [kind == "linear_attention" for kind in kinds])
    for spec in [*block.layer_specs, *mtp_specs]:
        if config.multi_latent_attention:
            spec.submodules.self_attention.submodules.core_attention = (
                _sparse_attention() if config.experimental_attention_variant else _LatentAttention
            )
        if hf_config.model_type == "minimax_m2":
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = NormOfAllQueries, NormOfAllKeys
        if names == "te":
            _name_norms_as_te(spec)
    post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=hf_config.vocab_size if padded_vocab_size is None else padded_vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_percent=_rotary_percent(hf_config),
        rotary_base=rotary_base(hf_config),
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    if value_head != "none" and post_process:
        model.output_layer = ValueHead(hf_config.hidden_size, 1, bias=value_head == "weight_and_bias")
    model.unpadded_vocab_size = 1 if value_head != "none" else hf_config.vocab_size
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module._maintain_float32_expert_bias()
            if hf_config.model_type == "ernie4_5_moe":
                module.gating = _as_of_sigmoids(module.gating)
        if config.multi_latent_attention and name.endswith((".q_layernorm", ".kv_layernorm")):
            module.eps = _MLA_NORM_EPSILON
    return model


def _rotary_percent(hf_config: PretrainedConfig) -> float:
    """The part of a head that is rotated."""
    if hf_config.model_type == "minimax_m2":
        return float(hf_config.rotary_dim / hf_config.head_dim)
    of_rope = getattr(hf_config, "rope_parameters", None) or {}  # of transformers 5
    return of_rope.get("partial_rotary_factor") or getattr(hf_config, "partial_rotary_factor", None) or 1.0


def _as_of_sigmoids(gating: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Logits whose sigmoids are the softmax of the router's: Megatron adds the bias of experts to sigmoids only."""
    return lambda hidden: gating(hidden).softmax(dim=-1).logit()


def _refuse(condition: object, reason: str) -> None:
    if condition:
        raise NotImplementedError(f"cannot build this model with megatron-core on CPU: {reason}")


def _attention_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    family = hf_config.model_type
    _refuse(family not in FAMILIES, f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    _refuse(hf_config.hidden_act != "silu", f"hidden_act {hf_config.hidden_act!r} is not 'silu'")
    _refuse(getattr(hf_config, "use_sliding_window", False), "use_sliding_window is set")
    if family == "deepseek_v3":
        return _mla_fields(hf_config)
    if family == "deepseek_v32":
        return {**_mla_fields(hf_config), **_indexer_fields(hf_config)}
    _refuse(rope_scaling(hf_config) is not None, "rope_scaling is not None")
    if family == "gpt_oss":
        return _gpt_oss_fields(hf_config)
    _refuse(getattr(hf_config, "sliding_window", None), "sliding_window is set")
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    # Those of llama and qwen3 include the output projection's, which is the demo's business.
    _refuse(attention_bias and family != "glm4_moe", "attention_bias is set")
    _refuse(getattr(hf_config, "mlp_bias", False), "mlp_bias is set")
    _refuse(getattr(hf_config, "use_bias", False), "use_bias is set")
    qkv_bias = {"qwen2": True, "mimo": True, "qwen2_moe": getattr(hf_config, "qkv_bias", True)}
    return {
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
        "qk_layernorm": family in ("qwen3", "qwen3_moe", "minimax_m2", "qwen3_next")
        or bool(getattr(hf_config, "use_qk_norm", False)),
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias.get(family, attention_bias),
        "rotary_interleaved": family == "ernie4_5_moe",
        **(_delta_net_fields(hf_config) if family == "qwen3_next" else {}),
    }


def _delta_net_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    names = (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    )
    return {
        **{name: getattr(hf_config, name) for name in names},
        "attention_output_gate": True,
        "hetereogenous_dist_checkpoint": True,
    }


def _gpt_oss_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    turns = ["sliding_attention", "full_attention"]
    _refuse(
        hf_config.layer_types != [turns[i % 2] for i in range(hf_config.num_hidden_layers)],
        "sliding and full attention do not take turns",
    )
    return {
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (hf_config.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    }


def _mla_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    _refuse(hf_config.attention_bias, "attention_bias is set")
    _refuse(not hf_config.rope_interleave, "rope_interleave is not set")
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    scaling = rope_scaling(hf_config)
    if scaling is not None:
        _refuse(scaling.get("rope_type", scaling.get("type")) != "yarn", "rope_scaling is not yarn")
        rope = {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            **{name: scaling[name] for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
        }
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf_config.num_attention_heads,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "rotary_base": rotary_base(hf_config),
        **rope,
    }


def _indexer_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf_config.index_n_heads,
        "dsa_indexer_head_dim": hf_config.index_head_dim,
        "dsa_indexer_topk": hf_config.index_topk,
    }


def _expert_fields(hf_config: PretrainedConfig, parallel: Parallel) -> dict[str, Any]:
    """Fields of a mixture of experts; none for a dense family."""
    common = {
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "moe_grouped_gemm": False,
        # The other dispatchers need CUDA streams.
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_router_topk": getattr(hf_config, "num_experts_per_tok", None),
    }
    match hf_config.model_type:
        case "mixtral" | "gpt_oss":
            return {
                **common,
                "num_moe_experts": hf_config.num_local_experts,
                "moe_ffn_hidden_size": hf_config.intermediate_size,
                # Softmax over the chosen ones is softmax over all, normalised afterwards.
                "moe_router_pre_softmax": False,
            }
        case "qwen2_moe" | "qwen3_moe" | "qwen3_next":
            layers = range(hf_config.num_hidden_layers)
            moe_layers = [
                int(i not in hf_config.mlp_only_layers and (i + 1) % hf_config.decoder_sparse_step == 0) for i in layers
            ]
            shared = getattr(hf_config, "shared_expert_intermediate_size", None)
            return {
                **common,
                "num_moe_experts": hf_config.num_experts,
                "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
                "moe_router_pre_softmax": not hf_config.norm_topk_prob,
                # As a list it makes Megatron give every layer keys of its own.
                "moe_layer_freq": 1 if all(moe_layers) else moe_layers,
                "moe_shared_expert_intermediate_size": shared,
                "moe_shared_expert_gate": shared is not None,
            }
        case "ernie4_5_moe":
            first, last = hf_config.moe_layer_start_index, hf_config.moe_layer_end_index
            return {
                **common,
                "num_moe_experts": hf_config.moe_num_experts,
                "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
                "moe_layer_freq": [
                    int(first <= i <= last and (i + 1) % hf_config.moe_layer_interval == 0)
                    for i in range(hf_config.num_hidden_layers)
                ],
                "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size
                * hf_config.moe_num_shared_experts,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            }
        case "minimax_m2":
            return {
                **common,
                "num_moe_experts": hf_config.num_local_experts,
                "moe_ffn_hidden_size": hf_config.intermediate_size,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            }
        case "deepseek_v3" | "deepseek_v32" | "glm4_moe":
            _refuse(not hf_config.norm_topk_prob, "norm_topk_prob is not set")
            _refuse(
                hf_config.n_group > 1 and hf_config.num_experts_per_tok != 2 * hf_config.topk_group,
                "num_experts_per_tok is not twice topk_group, so Megatron rates groups by another number of experts",
            )
            dense = min(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)
            return {
                **common,
                "num_moe_experts": hf_config.n_routed_experts,
                "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
                "moe_layer_freq": [0] * dense + [1] * (hf_config.num_hidden_layers - dense),
                "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * hf_config.n_shared_experts,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
                "moe_router_num_groups": hf_config.n_group if hf_config.n_group > 1 else None,
                "moe_router_group_topk": hf_config.topk_group if hf_config.n_group > 1 else None,
                "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
            }
    return {}


def _last_layer_spec(config: TransformerConfig) -> Any:
    """The spec of the model's last layer, in a block of its own."""
    whole = copy.copy(config)
    whole.pipeline_model_parallel_size = 1
    whole.virtual_pipeline_model_parallel_size = None
    whole.num_layers_in_first_pipeline_stage = whole.num_layers_in_last_pipeline_stage = None
    whole.account_for_embedding_in_pipeline_split = whole.account_for_loss_in_pipeline_split = False
    return get_gpt_decoder_block_spec(
        whole, use_transformer_engine=False, normalization="RMSNorm", vp_stage=None, pp_rank=0
    )


def _name_norms_as_te(layer_spec: Any) -> None:
    """Map keys of one layer's norms to those of `TELayerNormColumnParallelLinear`, which holds its norm."""
    submodules = layer_spec.submodules
    keys: dict[str, str] = {}
    # A router stands between norm and experts, so that nothing fuses with them.
    if submodules.mlp.module.__name__ == "MLP":
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if submodules.self_attention.module.__name__ == "MLASelfAttention":
        keys["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        keys["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    elif submodules.self_attention.module.__name__ == "GatedDeltaNet":
        keys["input_layernorm."] = _DELTA_NET_NORM
    else:
        keys["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    submodules.sharded_state_dict_keys_map = keys


@contextmanager
def _without_mtp(model: GPTModel) -> Iterator[None]:
    """Megatron's own forward runs multi-token prediction only together with a loss."""
    config = model.config
    process, layers = model.mtp_process, config.mtp_num_layers
    model.mtp_process, config.mtp_num_layers = False, None
    try:
        yield
    finally:
        model.mtp_process, config.mtp_num_layers = process, layers


@torch.no_grad()
def family_logits(chunks: Sequence[GPTModel], input_ids: Tensor, parallel: Parallel) -> list[Tensor] | None:
    """Run the whole pipeline forward with a causal mask, without dropping tokens.

    Args:
        chunks: this rank's stages: one, or `parallel.vpp` of them.
        input_ids: int64 `[batch, seq]`, the same on all ranks.
        parallel: the parallelism that `init_rank` was called with.

    Returns:
        On every rank of the last stage float32 logits (or values) `[batch, seq, vocab_size or 1]` of the
        model, then of each layer of multi-token prediction, which sees the tokens shifted by one more each
        (zeros come in at the end); None on other stages.
    """
    check_joined(parallel)
    if parallel.cp != 1:
        raise ValueError("local attention does not run with context parallelism")
    group = parallel_state.get_pipeline_model_parallel_group()
    batch, seq = input_ids.shape
    positions = torch.arange(seq).expand(batch, seq)
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    for model in chunks:
        # A training MoE layer refuses tensor parallelism without sequence parallelism.
        model.eval()
        if not model.pre_process:
            received = torch.empty(seq, batch, model.config.hidden_size, dtype=model.config.pipeline_dtype)
            dist.recv(received, src=parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
            model.set_input_tensor(received)
        decoder: dict[str, Any] = {}

        def keep(module: Any, args: Any, kwargs: Any, output: Tensor, kept: dict[str, Any] = decoder) -> None:
            kept.update(rotary_pos_emb=kwargs["rotary_pos_emb"], hidden_states=output)

        hook = model.decoder.register_forward_hook(keep, with_kwargs=True)
        with _without_mtp(model):
            output = model(input_ids, positions, mask, runtime_gather_output=True if model.post_process else None)
        hook.remove()
        if not model.post_process:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
            continue
        outputs = [output]
        if model.mtp_process:
            hidden = model.mtp(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=mask,
                embedding=model.embedding,
                **decoder,
            )
            tied = model.share_embeddings_and_output_weights
            weight = model.shared_embedding_or_output_weight() if tied else None
            for part in hidden.chunk(1 + model.config.mtp_num_layers)[1:]:
                logits, _ = model.output_layer(part, weight=weight, runtime_gather_output=True)
                outputs.append(logits.transpose(0, 1))
        return [logits[..., : model.unpadded_vocab_size].float().contiguous() for logits in outputs]
    return None
