"""Models made on the spot for measuring: their size is chosen, their weights are random bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from weighbridge import dtypes
from weighbridge.boxes import Box
from weighbridge.layouts import Layout, Shard, TensorSpec
from weighbridge_service.bridges import bridge_for
from weighbridge_service.model_tensors import ModelTensors

LAYERS = 8


def config_of(gigabytes: float) -> dict[str, object]:
    """A llama config with about this many GB of bf16 weights; eight layers, of a real model's proportions."""
    # per layer about 12 * hidden^2 weights (attention 2.5, MLP 3 * 3.5 with the factors below), and two vocabularies
    hidden = 256
    while _weights(hidden + 256) * 2 <= gigabytes * 1e9:
        hidden += 256
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _weights(hidden: int) -> int:
    return LAYERS * (hidden * hidden * 5 // 2 + 3 * hidden * hidden * 7 // 2) + 2 * 32_000 * hidden


def write_config(config: dict[str, object], folder: Path) -> bytes:
    """Write the model's folder, without weights; the content of ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    return text


def hugging_face_tensors(config_json: bytes) -> dict[str, Tensor]:
    """The model's weights: random bits in bf16."""
    generator = torch.Generator().manual_seed(0)
    specs = ModelTensors(dtypes.parse("bf16")).specs(bridge_for(config_json))
    return {name: random_bits(spec.shape, generator) for name, spec in specs.items()}


def random_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A bf16 tensor of random bits."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    """Whole tensors as a stream."""
    specs = [TensorSpec(name, dtypes.from_torch(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    return Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
