"""Example of a tensor-parallel inference engine that uses Weighbridge.

Each rank is transformers' own Llama with this rank's share of heads and of the MLP, and two sums over the ranks in
every layer. Configuration, tokenizer and weights come from the service, the weights straight into the parameters; no
rank ever sees a tensor larger than its slice.
"""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weighbridge import EngineClient, TensorParallel
from weighbridge_demo.language_model import be_quiet, continue_prompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Served:
    """Results of one rank of an engine.

    Attributes:
        number: the version that it pulled.
        nbytes: bytes that it pulled.
        parameter_bytes: bytes of its parameters.
        seconds: how long the pull took, planning included.
        lane: the lane by which the bytes came.
        text: continuation of the prompt.
    """

    number: int
    nbytes: int
    parameter_bytes: int
    seconds: float
    lane: str
    text: str


def serve(rank: int, server: str, model: str, version: str | int, size: int) -> Served:
    """Be one rank of an engine: pull its slices of a version, and continue the prompt."""
    from transformers import AutoConfig, AutoTokenizer

    be_quiet()
    with EngineClient(server) as client, tempfile.TemporaryDirectory(prefix="engine-") as folder:
        for name, content in client.model_files(model, version).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        engine = build_rank(AutoConfig.from_pretrained(folder), size)
        parameters = dict(engine.named_parameters())
        started = time.monotonic()
        pull = client.pull(model, version, TensorParallel(size, rank))
        names = [placement.shard.tensor for placement in pull.layout.placements]
        if sorted(names) != sorted(parameters):
            raise ValueError(f"the slices are not the parameters: {sorted({*names} ^ {*parameters})}")
        with torch.no_grad():
            for _ in pull.filled(lambda index: parameters[names[index]]):
                pass
        seconds = time.monotonic() - started
        text = continue_prompt(engine, AutoTokenizer.from_pretrained(folder))
    held = sum(parameter.nbytes for parameter in parameters.values())
    return Served(pull.version.number, pull.nbytes, held, seconds, pull.lane, text)


def build_rank(config: PretrainedConfig, size: int) -> Any:
    """One rank's part of a Llama in float32, its weights not yet set.

    Attention heads, key-value heads and the MLP's inner width are cut; embedding and output are whole.

    Args:
        config: config of the whole model.
        size: ranks that share it; all are members of torch.distributed's default group.

    Raises:
        ValueError: heads or inner width do not divide by the size.
    """
    from transformers import LlamaForCausalLM

    try:
        from transformers.initialization import no_init_weights
    except ModuleNotFoundError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    share = copy.deepcopy(config)
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, field)
        if value % size:
            raise ValueError(f"{field}={value} does not divide by {size}")
        setattr(share, field, value // size)
    with no_init_weights():
        model = LlamaForCausalLM(share).float().eval()
    model.tie_weights()
    if size > 1:
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(_sum_over_ranks)
            layer.mlp.down_proj.register_forward_hook(_sum_over_ranks)
    return model


def _sum_over_ranks(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
    """Sum the ranks' partial outputs. Each rank has multiplied with its columns of the weight only."""
    dist.all_reduce(output)
