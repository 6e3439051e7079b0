"""One rank of an SGLang engine without a server around it: models are built, loaded and updated by commands on standard
input.

Runs in SGLang's environment: ``python ranks.py RANK TP EP PORT``. Each input line is a list ``[command, argument...]``,
and gets one line with JSON as its answer; every rank of an engine receives the same lines.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from typing import Any

import torch
from building import Builder

from weighbridge.errors import WeighbridgeError
from weighbridge.follow.wanted import Wanted
from weighbridge.integrations.sglang import load, releases
from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

builder = Builder(*map(int, sys.argv[1:]))
ANSWER = "answer "
"""Prefix of answers; SGLang prints to standard output too."""

log = logging.getLogger(__name__)
models: dict[str, Any] = {}


def build(key: str, path: str, shape: dict[str, Any] | None = None) -> dict[str, Any]:
    """Construct a model and load it as a server would, from a folder or the service."""
    model = builder.build(path, shape or {})
    models[key] = model
    held = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    return {"held": sum(held.values()), "state": state(key)}


def different(one: str, other: str) -> dict[str, Any]:
    """Parameters and buffers that are not the same bits in both models."""
    a, b = models[one], models[other]
    first = {**dict(a.named_parameters()), **dict(a.named_buffers())}
    second = {**dict(b.named_parameters()), **dict(b.named_buffers())}
    names = sorted(first.keys() ^ second.keys())
    names += [n for n in first.keys() & second.keys() if not same(first[n], second[n])]
    return {"names": names, "compared": len(first)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8))
    )


def prepare(key: str, text: str) -> dict[str, Any]:
    rank, wanted = sglang_rank(models[key]), Wanted.from_json(text)
    rank.prepare_all(number_to_update_to(rank, wanted), source_of(wanted))
    return state(key)


def apply(key: str, text: str) -> dict[str, Any]:
    load(models[key], [(text, torch.empty(0))])
    return state(key)


def state(key: str) -> dict[str, Any]:
    return sglang_rank(models[key]).status().to_json()


def forget(*keys: str) -> dict[str, Any]:
    """All models but one are only needed for a moment; one is kept, for the groups are made with the first."""
    for key in keys:
        models[key] = None
    gc.collect()
    return {}


COMMANDS = {f.__name__: f for f in (build, different, prepare, apply, state, forget)}


def main() -> None:
    logging.disable(logging.INFO)
    if releases.has_registry():
        from sglang.srt.plugins import load_plugins

        load_plugins()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = COMMANDS[command](*arguments)
        except WeighbridgeError as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        except Exception as error:
            log.exception(command)
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
