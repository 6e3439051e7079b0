"""Models whose tokens are words, for servers that are asked in text; and what transformers answers in their place."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.reference import tiny_config, tiny_model
from weighbridge_demo.vllm_server import Answer

PROMPT = "w5 w17 w99"
LONG_PROMPT = " ".join(f"w{number * 37 % 128}" for number in range(200))
"""Longer than a block of an engine's cache of prefixes."""
TOKENS = 6


def make_folder(folder: Path, seed: int, family: str = "llama") -> PreTrainedModel:
    """A random model in float32, saved with its weights and a tokenizer of 128 words."""
    config = tiny_config(
        family,
        tied=False,
        hidden_size=256,
        intermediate_size=512,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = tiny_model(config, seed=seed)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)
    return model


def said_by_transformers(model: PreTrainedModel) -> Answer:
    """Greedy completion of `PROMPT` by `TOKENS` tokens."""
    tokens = [int(word[1:]) for word in PROMPT.split()]
    with torch.no_grad():
        found = model.generate(
            torch.tensor([tokens]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        scores = torch.log_softmax(model(found).logits[0, len(tokens) - 1 : -1].float(), dim=-1)
    said = found[0, len(tokens) :]
    logprobs = scores.gather(1, said[:, None])[:, 0].tolist()
    return Answer(" ".join(f"w{token}" for token in said.tolist()), logprobs)
