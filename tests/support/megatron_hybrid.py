"""Shards of megatron-core's hybrid model.

Its modules are the real ones; kernels of state space models run on CUDA alone.

What is stubbed computes: Triton's kernels, which megatron-core imports, and the gated norm that it takes from
mamba-ssm, of which only the weights count here. So such a model is built, and says what its shards are, but does not
run.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from weighbridge_demo.megatron_cpu import Parallel, check_joined, common_config

_TRITON = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


class _GatedNorm(torch.nn.Module):
    """mamba-ssm's norm, which has a weight for each element of the rank's heads; megatron-core derives from it, and
    cuts it.
    """

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


def _stub_kernels() -> None:
    kernels: Any = ModuleType(_TRITON)
    kernels.tensor_get_slice_after = kernels.tensor_masked_update = kernels.tensor_merge = None
    sys.modules.setdefault(_TRITON, kernels)
    norms: Any = ModuleType("mamba_ssm.ops.triton.layernorm_gated")
    norms.RMSNorm = _GatedNorm
    scans: Any = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    scans.mamba_chunk_scan_combined = scans.mamba_split_conv1d_scan_combined = None
    sys.modules.setdefault(norms.__name__, norms)
    sys.modules.setdefault(scans.__name__, scans)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules.setdefault(name, ModuleType(name))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

    from megatron.core.ssm import mamba_block, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    mamba_block.TENorm = WrappedTorchNorm


def build_hybrid_model(fields: dict[str, Any], parallel: Parallel) -> Any:
    """This rank's stage of a model of Nemotron-H's kind in float32, whose norms have the keys that Transformer Engine's
    layers give them.

    Args:
        fields: fields of a config of transformers, by their published names.
        parallel: the parallelism that `init_rank` was called with.
    """
    check_joined(parallel)
    _stub_kernels()
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.transformer import TransformerConfig

    config = SimpleNamespace(
        num_hidden_layers=len(fields["hybrid_override_pattern"]),
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        **fields,
    )
    made = TransformerConfig(
        **{
            **common_config(config, parallel, torch.float32),  # type: ignore[arg-type]
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": config.head_dim,
            "mamba_num_heads": config.mamba_num_heads,
            "mamba_head_dim": config.mamba_head_dim,
            "mamba_num_groups": config.n_groups,
            "mamba_state_dim": config.ssm_state_size,
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "add_bias_linear": False,
            "num_moe_experts": config.n_routed_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "expert_model_parallel_size": parallel.ep,
            "expert_tensor_parallel_size": parallel.expert_tp,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    )
    return MambaModel(
        made,
        _stack(config.n_routed_experts),
        vocab_size=config.vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=config.hybrid_override_pattern,
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )


def _stack(experts: int) -> Any:
    """megatron-core's spec of such a model, with its local modules in the place of Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    moe = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    return ModuleSpec(
        MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=mixer,
                    mamba_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=WrappedTorchNorm,
                    self_attention=attention,
                    self_attn_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=mlp,
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
                ),
            ),
            moe_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )
