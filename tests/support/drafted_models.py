"""Models with layers of multi-token prediction that draft exactly what the model says, as long as both are of one
version.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.word_models import make_folder

_HIDDEN = 256


def make_drafted_folder(folder: Path, seed: int) -> Qwen2ForCausalLM:
    """A random MiMo in float32 with one layer for prediction, and a tokenizer of 128 words; and what transformers makes
    of it without that layer.

    What layers add to an embedding is nothing, so that a word follows from the word before it. The final norms of the
    model and of its drafter turn the same elements of an embedding, other ones in each version: with the norm of
    another version the drafter drafts other words.
    """
    make_folder(folder, seed)  # for its tokenizer
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=128,
            hidden_size=_HIDDEN,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
    ).float()
    turned = torch.where(torch.rand(_HIDDEN) < 0.5, -1.0, 1.0)
    with torch.no_grad():
        model.model.norm.weight.copy_(turned)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    here, there = "model.layers.1.", "model.mtp_layers.0."
    weights |= {name.replace(here, there): tensor.clone() for name, tensor in weights.items() if name.startswith(here)}
    weights |= {f"{there}{kind}_layernorm.weight": torch.ones(_HIDDEN) for kind in ("token", "hidden")}
    weights[f"{there}final_layernorm.weight"] = turned.clone()
    weights[f"{there}input_proj.weight"] = torch.cat([torch.zeros(_HIDDEN, _HIDDEN), torch.eye(_HIDDEN)], dim=1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return model
