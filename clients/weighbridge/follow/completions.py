"""Builds requests to vLLM and SGLang servers for one token, or for the log probabilities of given tokens, and parses
the responses. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ASK_SECONDS = 60.0
"""Timeout for one token: a slower server is overloaded or paused."""
_PROMPT = (0,)
"""A prompt for measuring response time only: a token that every vocabulary contains."""
_VLLM_ONE = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}


def vllm_token() -> dict[str, Any]:
    """Body for ``/v1/completions``: any one token."""
    return {**_VLLM_ONE, "prompt": list(_PROMPT)}


def check_vllm_token(answer: Any) -> None:
    """Raise LookupError, TypeError or ValueError unless a response contains one token."""
    _check_one(answer["usage"]["completion_tokens"])


def vllm_last(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/v1/completions``: generate one token after all but the last. Only the last token is allowed, and vLLM
    returns its log probability from before the restriction (``--logprobs-mode raw_logprobs``, its default).
    """
    return {
        **_VLLM_ONE,
        "prompt": list(tokens[:-1]),
        "logprobs": 0,
        "allowed_token_ids": [tokens[-1]],
    }


def vllm_whole(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/v1/completions``: the log probability of each token of a prompt. vLLM computes the whole prompt for
    that, without the prefix cache.
    """
    return {**_VLLM_ONE, "prompt": list(tokens), "prompt_logprobs": 0}


def read_vllm_last(answer: Any) -> float:
    """Log probability of the allowed token. Raises LookupError, TypeError or ValueError for any other response."""
    [found] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return _number(found)


def read_vllm_whole(answer: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log probabilities of the tokens after the first. Raises as `read_vllm_last`."""
    found: Sequence[Mapping[str, Any]] = answer["choices"][0]["prompt_logprobs"][1:]
    if len(found) != len(tokens) - 1:
        raise ValueError(f"log probabilities of {len(found)} tokens, not of {len(tokens) - 1}")
    return tuple(_number(each[str(token)]["logprob"]) for token, each in zip(tokens[1:], found, strict=True))


_SGLANG_ONE = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}


def sglang_token() -> dict[str, Any]:
    """Body for ``/generate``: any one token."""
    return {"input_ids": list(_PROMPT), "sampling_params": _SGLANG_ONE}


def check_sglang_token(answer: Any) -> None:
    """Raise as `check_vllm_token`."""
    _check_one(answer["meta_info"]["completion_tokens"])


def sglang_last(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/generate``: the log probability of the last token given the others.

    SGLang uses its prefix cache for the others.
    """
    return {
        "input_ids": list(tokens[:-1]),
        "sampling_params": _SGLANG_ONE,
        "return_logprob": True,
        "token_ids_logprob": [tokens[-1]],
    }


def sglang_whole(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/generate``: the log probability of each token of a prompt.

    SGLang computes all from ``logprob_start_len`` on.
    """
    return {
        "input_ids": list(tokens),
        "sampling_params": _SGLANG_ONE,
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_sglang_last(answer: Any, token: int) -> float:
    """Log probability of the requested token. Raises as `read_vllm_last`."""
    first = answer["meta_info"]["output_token_ids_logprobs"][0]
    [value] = [value for value, found, *_ in first if found == token]
    return _number(value)


def read_sglang_whole(answer: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log probabilities of the tokens after the first. Raises as `read_vllm_last`."""
    found = answer["meta_info"]["input_token_logprobs"]
    if [token for _, token, *_ in found] != list(tokens):
        raise ValueError("log probabilities of tokens other than the prompt's")
    return tuple(_number(value) for value, *_ in found[1:])


def _check_one(count: Any) -> None:
    if count != 1:
        raise ValueError(f"{count} tokens, not one")


def _number(value: Any) -> float:
    """A log probability; servers write null if it is not finite."""
    return math.nan if value is None else float(value)
