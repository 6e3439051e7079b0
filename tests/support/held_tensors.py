"""Tensors that ranks of a trainer hold of a model, by the conventions of Megatron-core, for families that it cannot
build on CPU.

A family is a function that gives for each tensor of the model what Megatron-core would hold without any parallelism,
and how it is cut; `shards_of` makes one rank's sharded state dict of it, with Megatron-core's own constructor. Nothing
here is computed by Weighbridge or mbridge: query, key and value are interleaved by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

Cut = Literal["whole", "rows", "columns", "halves"]
Weights = Mapping[str, Tensor]
TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
VISION = {"hidden_size": 32, "intermediate_size": 64}


@dataclass(frozen=True)
class Grid:
    """A training job: how many ways it is cut. Ranks are numbered tensor first, then data, then pipeline."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


DENSE = [Grid(), Grid(tp=2), Grid(pp=2), Grid(tp=2, pp=2, dp=2)]
EXPERTS = [
    Grid(),
    Grid(tp=2, etp=2),
    Grid(pp=2, dp=2, ep=2),
    Grid(tp=2, ep=2),
    Grid(tp=2, pp=2, dp=2, ep=2, etp=2),
]


@dataclass(frozen=True)
class Held:
    """A whole tensor as Megatron-core would hold it without any parallelism.

    Attributes:
        key: with `{}` in the place of the layer's number, if it is in a layer.
        data: the tensor.
        cut: cut by tensor parallelism; "halves" cuts the upper and the lower half of the rows each.
        layer: number of its decoder layer (or block of the vision tower), and the number of these.
        expert: number of its expert in the layer, and the number of experts.
        stage: pipeline stage of the tensor, if its layer does not decide it.
        stacked: whether its layers are under one key.
        copy: whether it is a copy of the main replica that another stage has.
    """

    key: str
    data: Tensor
    cut: Cut = "whole"
    layer: tuple[int, int] | None = None
    expert: tuple[int, int] | None = None
    stage: Literal["by layer", "first", "last"] = "by layer"
    stacked: bool = True
    copy: bool = False


def interleaved(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """For each key-value head its query heads, its key and its value; of weights or biases."""
    found = []
    for group in range(groups):
        found += [tensor.chunk(groups)[group] for tensor in (q, k, v)]
    return torch.cat(found)


def by_projection(weights: Weights, prefix: str, kind: str, groups: int) -> Tensor:
    q, k, v = (weights[f"{prefix}.{p}_proj.{kind}"] for p in "qkv")
    return interleaved(q, k, v, groups)


def gate_up(weights: Weights, prefix: str, kind: str = "weight") -> Tensor:
    return torch.cat([weights[f"{prefix}.{p}_proj.{kind}"] for p in ("gate", "up")])


def ends(weights: Weights, embedding: str, norm: str, head: str, prefix: str = "language_model.") -> Iterator[Held]:
    """The embedding, the last norm, and the output layer, which may be the embedding."""
    name = f"{prefix}embedding.word_embeddings.weight"
    yield Held(name, weights[embedding], "rows", stage="first")
    yield Held(f"{prefix}decoder.final_layernorm.weight", weights[norm], stage="last")
    if head in weights:
        yield Held(f"{prefix}output_layer.weight", weights[head], "rows", stage="last")
    else:
        yield Held(name, weights[embedding], "rows", stage="last", copy=True)


def shards_of(held: Sequence[Held], grid: Grid, rank: int) -> dict[str, list[ShardedTensor]]:
    """The sharded state dict of one rank: its parts of what it holds."""
    stage, within = divmod(rank, grid.tp * grid.dp)
    found: dict[str, list[ShardedTensor]] = {}
    for item in held:
        if item.copy and grid.pp == 1:
            continue  # one stage has the embedding once
        if stage != stage_of(item, grid):
            continue
        index, size, replica = within % grid.tp, grid.tp, within // grid.tp
        if item.expert is not None:
            index, size = within % grid.etp, grid.etp
            replica = within // (grid.etp * grid.ep)
            expert, experts = item.expert
            if expert // (experts // grid.ep) != within // grid.etp % grid.ep:
                continue
        replica_id = (int(item.copy), index if item.cut == "whole" else 0, replica)
        leading = []
        if item.layer is not None and item.stacked:
            leading.append(item.layer)
        if item.expert is not None:
            leading.append(item.expert)
        number = "" if item.layer is None or item.stacked else str(item.layer[0])
        key = item.key.replace("{}.", f"{number}." if number else "")
        found.setdefault(key, [])
        for axis, part, parts, data in parts_of(item, index, size):
            found[key].append(
                ShardedTensor.from_rank_offsets(
                    key,
                    data.clone(),
                    *((a, i, n) for a, (i, n) in enumerate(leading)),
                    (len(leading) + axis, part, parts),
                    replica_id=replica_id,
                    prepend_axis_num=len(leading),
                )
            )
    return found


def stage_of(item: Held, grid: Grid) -> int:
    if item.stage == "by layer":
        assert item.layer is not None
        layer, layers = item.layer
        return layer * grid.pp // layers
    return 0 if item.stage == "first" else grid.pp - 1


def parts_of(item: Held, index: int, size: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """Axis, which part along it of how many, and the part."""
    match item.cut:
        case "whole":
            yield 0, 0, 1, item.data
        case "rows":
            yield 0, index, size, item.data.chunk(size, dim=0)[index]
        case "columns":
            yield 1, index, size, item.data.chunk(size, dim=1)[index]
        case "halves":
            for half in (index, size + index):
                yield 0, half, 2 * size, item.data.chunk(2 * size, dim=0)[half]
