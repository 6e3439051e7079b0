"""Requests for one token, and for the log probabilities of given ones, as servers of vLLM and SGLang take them, and their answers read. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ASK_SECONDS = 60.0
"""For one token: a server that takes longer has too much to do, or is paused."""
_PROMPT = (0,)
"""A prompt of which only the time of its answer counts: a token that each vocabulary has."""
_VLLM_ONE = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}


def vllm_token() -> dict[str, Any]:
    """Body for ``/v1/completions``: one token, whichever."""
    return {**_VLLM_ONE, "prompt": list(_PROMPT)}


def check_vllm_token(answer: Any) -> None:
    """Raise LookupError, TypeError or ValueError if an answer has not one token."""
    _check_one(answer["usage"]["completion_tokens"])


def vllm_last(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/v1/completions``: one token behind all but the last. No other one is allowed, and vLLM gives the log probability that it had before
    others were forbidden (``--logprobs-mode raw_logprobs``, its default)."""
    return {
        **_VLLM_ONE,
        "prompt": list(tokens[:-1]),
        "logprobs": 0,
        "allowed_token_ids": [tokens[-1]],
    }


def vllm_whole(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/v1/completions``: the log probability of each token of a prompt. vLLM computes the whole prompt for that, and reads no cached prefix."""
    return {**_VLLM_ONE, "prompt": list(tokens), "prompt_logprobs": 0}


def read_vllm_last(answer: Any) -> float:
    """Log probability of the token that was allowed. Raises LookupError, TypeError or ValueError for what is no such answer."""
    [found] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return _number(found)


def read_vllm_whole(answer: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log probabilities of the tokens after the first. Raises as `read_vllm_last`."""
    found: Sequence[Mapping[str, Any]] = answer["choices"][0]["prompt_logprobs"][1:]
    if len(found) != len(tokens) - 1:
        raise ValueError(f"log probabilities of {len(found)} tokens, and not of {len(tokens) - 1}")
    return tuple(_number(each[str(token)]["logprob"]) for token, each in zip(tokens[1:], found, strict=True))


_SGLANG_ONE = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}


def sglang_token() -> dict[str, Any]:
    """Body for ``/generate``: one token, whichever."""
    return {"input_ids": list(_PROMPT), "sampling_params": _SGLANG_ONE}


def check_sglang_token(answer: Any) -> None:
    """Raise as `check_vllm_token`."""
    _check_one(answer["meta_info"]["completion_tokens"])


def sglang_last(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/generate``: the log probability of the last token behind the others, whose cached prefixes SGLang uses."""
    return {
        "input_ids": list(tokens[:-1]),
        "sampling_params": _SGLANG_ONE,
        "return_logprob": True,
        "token_ids_logprob": [tokens[-1]],
    }


def sglang_whole(tokens: Sequence[int]) -> dict[str, Any]:
    """Body for ``/generate``: the log probability of each token of a prompt. SGLang computes all from ``logprob_start_len`` on."""
    return {
        "input_ids": list(tokens),
        "sampling_params": _SGLANG_ONE,
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_sglang_last(answer: Any, token: int) -> float:
    """Log probability of the token that was asked for. Raises as `read_vllm_last`."""
    first = answer["meta_info"]["output_token_ids_logprobs"][0]
    [value] = [value for value, found, *_ in first if found == token]
    return _number(value)


def read_sglang_whole(answer: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log probabilities of the tokens after the first. Raises as `read_vllm_last`."""
    found = answer["meta_info"]["input_token_logprobs"]
    if [token for _, token, *_ in found] != list(tokens):
        raise ValueError("log probabilities of other tokens than the prompt's")
    return tuple(_number(value) for value, *_ in found[1:])


def _check_one(count: Any) -> None:
    if count != 1:
        raise ValueError(f"{count} tokens, and not one")


def _number(value: Any) -> float:
    """A log probability; servers write null where it is not finite."""
    return math.nan if value is None else float(value)
