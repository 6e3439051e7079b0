"""Tiny models of transformers whose model types have no weight map, with random weights and tensors of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_DECODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 32,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "pad_token_id": 0}
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16, "patch_size": 8,
}  # fmt: skip
_STATE_SPACE = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8}
_BOTH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99, "pad_token_id": 0,
}  # fmt: skip
_TEXT, _SEQUENCES = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
_MASKED, _IMAGES, _BARE = "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel"

UNMAPPED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # dense; gpt2 and bloom are tied, falcon has one tensor for queries, keys and values
    "gpt2": (_TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 32}),
    "gpt_neox": (_TEXT, _DECODER),
    "opt": (_TEXT, {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": (_TEXT, {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "falcon": (_TEXT, _DECODER),
    "phi3": (_TEXT, _GROUPED),
    "gemma2": (_TEXT, {**_GROUPED, "head_dim": 8}),
    "starcoder2": (_TEXT, _GROUPED),
    # experts one by one, stacked, and stacked with biases
    "olmoe": (_TEXT, {**_GROUPED, "num_experts": 4}),
    "granitemoe": (_TEXT, {**_GROUPED, "num_local_experts": 4}),
    # state spaces, alone and between layers of attention with experts
    "mamba": (_TEXT, _STATE_SPACE),
    "mamba2": (_TEXT, {**_STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "falcon_mamba": (_TEXT, _STATE_SPACE),
    "jamba": (
        _TEXT,
        {**_GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    ),
    # images; resnet has integer counters without axes, clip a scalar, and both of clip's and siglip's configs are
    # nested
    "vit": (_IMAGES, _VISION),
    "dinov2": (_BARE, _VISION),
    "resnet": (_IMAGES, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    "clip": (_BARE, {"text_config": _DECODER, "vision_config": _VISION, "projection_dim": 16}),
    "siglip": (_BARE, {"text_config": {**_DECODER, "projection_size": 32}, "vision_config": _VISION}),
    # encoders with decoders, two or three embeddings tied
    "t5": (_SEQUENCES, {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}),
    "bart": (_SEQUENCES, _BOTH),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {**_BOTH, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16, "decoder_start_token_id": 1},
    ),
    # encoders; wav2vec2 has parametrised weights
    "bert": (_MASKED, _DECODER),
    "deberta-v2": (_MASKED, _DECODER),
    "wav2vec2": (
        "AutoModelForCTC",
        {
            **_DECODER, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0,
        },
    ),
}  # fmt: skip
"""Class of `transformers` and fields of the config, by model type. Their names in memory are those in files."""


def unmapped_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of one of `UNMAPPED` with random weights, counters and running means among them."""
    config: PretrainedConfig = transformers.CONFIG_MAPPING[model_type](**UNMAPPED[model_type][1])
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class(model_type).from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(1, 1000)
    return model


def auto_class(model_type: str) -> Any:
    """The class of `transformers` that makes and loads a model of one of `UNMAPPED`."""
    return getattr(transformers, UNMAPPED[model_type][0])


def loaded_by_transformers(model_type: str, folder: Path) -> dict[str, Tensor]:
    """The state dict of what transformers loads from a folder, tied copies among it."""
    return dict(auto_class(model_type).from_pretrained(folder).state_dict())
