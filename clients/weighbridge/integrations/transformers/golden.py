"""Golden prompts from a transformers model: log probabilities of the tokens of given prompts, and prompts that the
model generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weighbridge._core.engines.golden import MOST_TOKENS, GoldenPrompt
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator


def golden_prompts(model: Any, prompts: Iterable[Sequence[int]]) -> list[GoldenPrompt]:
    """Golden prompts for `TrainerClient.push`: each prompt with the log probabilities that the model assigns to its
    tokens.

    The model computes in its own dtype, the softmax in float32. If the model is sharded over ranks, all ranks call
    this.

    Args:
        model: a causal language model: called with ``input_ids`` of shape (1, tokens), it returns ``logits`` of shape
            (1, tokens, vocabulary). Its mode (``train`` or ``eval``) is restored afterwards.
        prompts: token ids of each, 2 to 256.

    Raises:
        InvalidArgument: a prompt has fewer or more tokens, or a token is outside the vocabulary.
    """
    found = []
    with _evaluating(model):
        for tokens in prompts:
            ids = [int(token) for token in tokens]
            _check_vocabulary(model, ids)
            logits = model(input_ids=torch.tensor([ids], device=_device(model))).logits[0, :-1].float()
            after = torch.tensor(ids[1:], device=logits.device)[:, None]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, after)[:, 0]
            found.append(GoldenPrompt(tuple(ids), tuple(logprobs.tolist())))
    return found


def written_prompts(model: Any, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Prompts that a model generates itself: after a random first token, tokens are sampled from its probabilities.

    Args:
        model: a transformers model with ``generate``.
        count: how many.
        tokens: length of each, 2 to 256.
        seed: random seed; the same seed and model give the same prompts.

    Raises:
        InvalidArgument: ``tokens`` is out of range.
    """
    if not 2 <= tokens <= MOST_TOKENS:
        raise InvalidArgument(f"golden prompts cannot have {tokens} tokens", fix=f"use 2 to {MOST_TOKENS}")
    with _evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = torch.randint(_vocabulary(model), (count, 1)).to(_device(model))
        found = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=tokens - 1,
            min_new_tokens=tokens - 1,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            pad_token_id=0,
        )
    written: list[list[int]] = found.tolist()
    return written


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _device(model: Any) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _check_vocabulary(model: Any, ids: Sequence[int]) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    size = _vocabulary(model)
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise InvalidArgument(
            f"token {outside[0]} is outside the vocabulary of {size} tokens",
            fix="make prompts with the tokenizer of this model",
        )
