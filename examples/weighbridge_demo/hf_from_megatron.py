"""Hugging Face weights of a Llama, made in plain torch of what Megatron ranks hold.

An answer that shares no code with Weighbridge, to compare its answer with. The conventions are megatron-core's:
``linear_qkv`` has, for each key-value head, the query heads that use it, then the key, then the value; ``linear_fc1``
has all gate rows, then all up rows; layers are a leading axis of the tensors in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COPIED = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj": "self_attention.linear_proj.weight",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj": "mlp.linear_fc2.weight",
}
"""Tensors of a layer that are the same on both sides: Hugging Face's names, Megatron's."""


@dataclass(frozen=True)
class DumpedShard:
    """A piece of a Megatron tensor as one rank holds it; shapes and offset include the axis of layers."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


def dump_shards(model: Any) -> list[DumpedShard]:
    """Copies of all weights of one rank's Megatron model, described as megatron-core describes them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found: list[DumpedShard] = []
    for entry in model.sharded_state_dict().values():
        pieces = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for piece in pieces:
            if isinstance(piece, ShardedTensor):
                data = piece.data.detach().clone().reshape((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
                found.append(DumpedShard(piece.key, tuple(piece.global_shape), tuple(piece.global_offset), data))
    return found


def assemble(shards: Sequence[DumpedShard]) -> dict[str, Tensor]:
    """Whole Megatron tensors by key.

    Raises:
        ValueError: some element is held by no rank, or two ranks hold it with different values.
    """
    whole: dict[str, Tensor] = {}
    for shard in shards:
        if shard.key not in whole:
            whole[shard.key] = torch.full(shard.global_shape, torch.nan)
        tensor = whole[shard.key]
        box = tensor[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.data.shape, strict=True))]
        if not torch.equal(box, shard.data) and not box.isnan().all():
            raise ValueError(f"ranks disagree on {shard.key} at {shard.offset}")
        box.copy_(shard.data)
    for key, tensor in whole.items():
        if tensor.isnan().any():
            raise ValueError(f"no rank holds some elements of {key}")
    return whole


def convert_llama(megatron: dict[str, Tensor], config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of a Llama without biases, its embeddings tied.

    Args:
        megatron: whole tensors, layers stacked.
        config: the Hugging Face configuration.
    """
    groups, head_dim, hidden = config.num_key_value_heads, config.head_dim, config.hidden_size
    queries = config.num_attention_heads // groups
    yield "model.embed_tokens.weight", megatron["embedding.word_embeddings.weight"][: config.vocab_size]
    yield "model.norm.weight", megatron["decoder.final_layernorm.weight"]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for ours, theirs in _COPIED.items():
            yield f"{prefix}.{ours}.weight", megatron[f"decoder.layers.{theirs}"][layer]
        fused = megatron["decoder.layers.self_attention.linear_qkv.weight"][layer]
        per_group = fused.reshape(groups, queries + 2, head_dim, hidden)
        yield f"{prefix}.self_attn.q_proj.weight", per_group[:, :queries].reshape(-1, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", per_group[:, queries].reshape(-1, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", per_group[:, queries + 1].reshape(-1, hidden)
        gate, up = megatron["decoder.layers.mlp.linear_fc1.weight"][layer].chunk(2)
        yield f"{prefix}.mlp.gate_proj.weight", gate
        yield f"{prefix}.mlp.up_proj.weight", up
