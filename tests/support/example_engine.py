"""An engine of your own: a llama over tensor-parallel ranks that starts from the service and updates to new versions."""

from __future__ import annotations

import torch

from weighbridge.integrations.engine_rank.agreement import ProcessGroup
from weighbridge.integrations.engine_rank.model import EngineModel
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

STACKS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
COLUMNS = ("o_proj", "down_proj")


class Llama(torch.nn.Module):
    """One rank's parameters. q, k and v are one, and gate and up are one; norms are whole, two are cut by columns."""

    def __init__(self, config, rank, size):
        super().__init__()
        self.config, self.tp_rank, self.tp_size = config, rank, size
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
        shapes = {"model.embed_tokens": [config.vocab_size // size, hidden], "model.norm": [hidden]}
        shapes["lm_head"] = shapes["model.embed_tokens"]
        for layer in (f"model.layers.{n}." for n in range(config.num_hidden_layers)):
            shapes[layer + "self_attn.qkv"] = [(q + 2 * kv) // size, hidden]
            shapes[layer + "self_attn.o_proj"] = [hidden, q // size]
            shapes[layer + "mlp.gate_up"] = [2 * inner // size, hidden]
            shapes[layer + "mlp.down_proj"] = [hidden, inner // size]
            shapes[layer + "input_layernorm"] = shapes[layer + "post_attention_layernorm"] = [hidden]
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.empty(shape)))

    def load_weights(self, weights):
        """Copy what this rank holds of the tensors of a Hugging Face checkpoint to where it belongs."""
        for name, tensor in weights:
            module, _, kind = name.removesuffix(".weight").rpartition(".")
            if "norm" not in kind:
                tensor = tensor.chunk(self.tp_size, dim=1 if kind in COLUMNS else 0)[self.tp_rank]
            stack = next((stack for stack, kinds in STACKS.items() if kind in kinds), None)
            place = self.get_parameter(f"{module}.{stack or kind}".strip(".").replace(".", "_")).data
            if stack:
                before = STACKS[stack][: STACKS[stack].index(kind)]
                place = place.narrow(0, sum(self.rows[each] // self.tp_size for each in before), len(tensor))
            place.copy_(tensor)


class LlamaEngine(EngineModel):
    """Facts about this engine that the contract cannot know."""

    @property
    def ranks(self):
        return ProcessGroup()

    def configuration(self):
        return f"example 1, rank {self.ranks.rank} of {self.ranks.size}, {self.model.config}"


def start(config, server, name, number):
    """A rank whose model has the weights of a version. Every rank calls it with the same number."""
    ranks = ProcessGroup()
    rank = EngineRank(LlamaEngine(Llama(config, ranks.rank, ranks.size)))
    source, recording = rank.load(ModelSource(name, server), number)
    rank.engine.load(source.tensors(recording.unrecorded))  # usually none
    return rank
