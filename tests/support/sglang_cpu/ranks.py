"""One rank of an SGLang engine without a server around it: models are built, loaded and updated as told on standard input.

Runs in SGLang's environment: ``python ranks.py RANK TP EP PORT``. Each line that comes is a list ``[command, argument...]``, and gets one line
with JSON as its answer; every rank of an engine is told the same.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_device, get_model, publish
from sglang.srt.server_args import ServerArgs

from weighbridge.errors import WeighbridgeError
from weighbridge.follow.wanted import Wanted
from weighbridge.integrations.sglang import load
from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

RANK, TP, EP, PORT = map(int, sys.argv[1:])
ANSWER = "answer "
"""What answers begin with; SGLang prints to standard output too."""

log = logging.getLogger(__name__)
models: dict[str, Any] = {}


def build(key: str, path: str, shape: dict[str, Any] | None = None) -> dict[str, Any]:
    """Construct a model and load it as a server would, from a folder or the service."""
    arguments = ServerArgs(
        model_path=path,
        served_model_name="tiny",
        device="cpu",
        tp_size=TP,
        ep_size=EP,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        json_model_override_args=json.dumps(shape or {}),
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=RANK, gpu_id=0))
    initialize_moe_config()
    config = ModelConfig.from_server_args(arguments)
    if not models:
        bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=PORT)
    bootstrap.init_layer_runtime(model_config=config)
    loader = get_model_loader(LoadConfig(load_format=get_model().load_format, tp_rank=RANK), config)
    model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
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
        and torch.equal(
            one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8)
        )
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
