"""Layouts of Megatron-core ranks, by the conventions of its distributed checkpoints.

They are used for restores without a model, for conversions of folders and for planning. A running trainer declares the
layout of its own ``sharded_state_dict()`` instead.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridges import Bridge, MegatronTensor

_ROWS, _COLUMNS = 0, 1
_CUTS = {
    # modules that tensor parallelism cuts, with the axis of the weight; all other modules are replicated
    "word_embeddings": _ROWS,
    "output_layer": _ROWS,
    "linear_qkv": _ROWS,
    "linear_q_proj": _ROWS,
    "linear_q_up_proj": _ROWS,
    "linear_kv_up_proj": _ROWS,
    "linear_fc1": _ROWS,
    "core_attention": _ROWS,  # one element for each head
    "eh_proj": _ROWS,
    "in_proj": _ROWS,
    "conv1d": _ROWS,
    "out_proj": _COLUMNS,
    "linear_proj": _COLUMNS,
    "linear_fc2": _COLUMNS,
}
_IN_LAYER = re.compile(r"^(?:language_model\.)?decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
_LAST_STAGE = re.compile(r"(^|\.)(decoder\.final_(?:layer)?norm|output_layer|mtp)\.")


@dataclass(frozen=True)
class Stages:
    """Assignment of the decoder's layers to pipeline stages.

    Attributes:
        layers: the layers of each stage, ascending.
    """

    layers: tuple[tuple[int, ...], ...]

    @staticmethod
    def spread(
        num_layers: int,
        size: int,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> Stages:
        """Spread layers as Megatron-core does.

        Args:
            num_layers: number of decoder layers.
            size: number of pipeline stages.
            first: number of layers on the first stage (``num_layers_in_first_pipeline_stage``), if it differs from the
                others'.
            last: number of layers on the last stage (``num_layers_in_last_pipeline_stage``), if it differs from the
                others'.

        Raises:
            InvalidArgument: the layers cannot be divided among the stages.
        """
        uneven = [n for n in (first, last) if n is not None]
        middle = size - len(uneven)
        rest = num_layers - sum(uneven)
        if size < 1 or middle < 0 or rest < 0 or (rest % middle if middle else rest):
            raise InvalidArgument(
                f"{num_layers} layers cannot be spread evenly over {size} pipeline stages",
                fix="choose a size that divides them; a running trainer declares its own stages, of any sizes",
            )
        each = rest // middle if middle else 0
        per_stage = [each] * size
        if first is not None:
            per_stage[0] = first
        if last is not None:
            per_stage[-1] = last
        ends = itertools.accumulate(per_stage)
        return Stages(tuple(tuple(range(end - count, end)) for end, count in zip(ends, per_stage, strict=True)))


def megatron_layout(
    bridge: Bridge,
    tensors: Mapping[str, TensorSpec],
    rank: MegatronRank,
    stages: Stages | None = None,
    *,
    experts_apart: bool = False,
) -> Layout:
    """Layout of the shards that a Megatron-core rank holds, with a key for each layer.

    The vocabulary is padded to a multiple of the tensor-parallel size.

    Args:
        bridge: bridge of the model.
        tensors: the model's tensors in Hugging Face's space, which give the dtypes.
        rank: the rank.
        stages: layers of the pipeline stages; spread evenly by default.
        experts_apart: whether each expert has its own key, instead of one tensor for all experts of a layer.

    Raises:
        InvalidArgument: the model cannot be divided by the sizes, or the rank does not exist.
    """
    for what, (index, size) in (
        ("tensor", rank.tp),
        ("pipeline", rank.pp),
        ("expert", rank.ep),
        ("expert tensor", rank.etp),
    ):
        if size < 1 or not 0 <= index < size:
            raise InvalidArgument(f"{what}-parallel rank {index} of {size} does not exist", fix="ranks count from 0")
    heads, kv_heads = bridge.head_counts()
    if heads % rank.tp[1] or kv_heads % rank.tp[1]:
        raise InvalidArgument(f"{heads} heads with {kv_heads} key-value heads cannot be shared by {rank.tp[1]} ranks")
    if bridge.experts % rank.ep[1]:
        raise InvalidArgument(f"{bridge.experts} experts cannot be spread over {rank.ep[1]} ranks")
    stages = stages or Stages.spread(bridge.num_layers, rank.pp[1])
    each = bridge.experts // rank.ep[1]
    experts = range(rank.ep[0] * each, (rank.ep[0] + 1) * each)
    specs: dict[str, TensorSpec] = {}
    shards: list[Shard] = []
    for entry in _held(_groups(bridge), rank, stages.layers[rank.pp[0]], experts):
        for spec, found in _shards(bridge, entry, tensors[entry.targets[0].name], rank, experts_apart):
            specs[spec.name] = spec
            shards += found
    return Layout.stream(specs.values(), shards)


@dataclass(frozen=True)
class _Groups:
    """A model's tensors, grouped by the ranks that hold them."""

    first: list[MegatronTensor]  # before the decoder
    last: list[MegatronTensor]  # after it
    embedding: list[MegatronTensor]  # also on the last stage: as a tied output layer, or for multi-token prediction
    layers: dict[int, list[MegatronTensor]]
    of_experts: dict[tuple[int, int], list[MegatronTensor]]  # by place and expert


BEFORE_THE_LAYERS, BEHIND_THE_LAYERS = -2, -1
"""Places of tensors that belong to no layer of the decoder."""


def place_of(name: str) -> int:
    """Decoder layer of a Megatron-core tensor, `BEFORE_THE_LAYERS` or `BEHIND_THE_LAYERS`."""
    of_layer = _IN_LAYER.match(name)
    if of_layer:
        return int(of_layer[1])
    behind = _LAST_STAGE.search(name) and not name.startswith("vision")
    return BEHIND_THE_LAYERS if behind else BEFORE_THE_LAYERS


@functools.lru_cache(maxsize=8)
def _groups(bridge: Bridge) -> _Groups:
    groups = _Groups([], [], [], {}, {})
    untied = any(name.endswith("output_layer.weight") for name in bridge.megatron)
    predicting = any(name.startswith("mtp.") for name in bridge.megatron)
    for name, entry in bridge.megatron.items():
        place, of_expert = place_of(name), _EXPERT.search(name)
        if of_expert:
            groups.of_experts.setdefault((place, int(of_expert[1])), []).append(entry)
        elif place >= 0:
            groups.layers.setdefault(place, []).append(entry)
        elif place == BEHIND_THE_LAYERS:
            groups.last.append(entry)
        else:
            groups.first.append(entry)
            if name.endswith("word_embeddings.weight") and (predicting or not untied):
                groups.embedding.append(entry)
    return groups


def _held(groups: _Groups, rank: MegatronRank, layers: Sequence[int], experts: range) -> Iterator[MegatronTensor]:
    stage, size = rank.pp
    last = stage == size - 1
    if stage == 0:
        yield from groups.first
    for layer in (*layers, BEHIND_THE_LAYERS) if last else layers:
        yield from groups.layers.get(layer, ())
        for expert in experts:
            yield from groups.of_experts.get((layer, expert), ())
    if last:
        yield from groups.last
        yield from groups.embedding if stage else ()


def _shards(
    bridge: Bridge, entry: MegatronTensor, like: TensorSpec, rank: MegatronRank, experts_apart: bool
) -> Iterator[tuple[TensorSpec, list[Shard]]]:
    of_expert = _EXPERT.search(entry.name)
    index, size = rank.etp if of_expert else rank.tp
    for name, part in entry.declared():
        shape = part.extent
        if entry.rule.vocabulary:
            shape = (math.ceil(shape[0] / rank.tp[1]) * rank.tp[1], *shape[1:])
        boxes = list(_boxes(entry, shape, index, size))
        cut = size > 1 and boxes[0].extent != shape
        again = entry.rule.vocabulary and rank.pp[0] > 0 and "word_embeddings" in name
        main = not (rank.expert_dp if of_expert else rank.dp) and (cut or index == 0) and not again
        if not of_expert or experts_apart:
            yield TensorSpec(name, like.dtype, shape), [Shard(name, box, main) for box in boxes]
            continue
        name = name.replace(of_expert[0], ".experts.experts.", 1)
        spec = TensorSpec(name, like.dtype, (bridge.experts, *shape))
        yield spec, [Shard(name, box.under((int(of_expert[1]),)), main) for box in boxes]


def _boxes(entry: MegatronTensor, shape: Sequence[int], index: int, size: int) -> Iterator[Box]:
    module, _, kind = entry.name.rpartition(".")
    axis = _ROWS if entry.rule.by_heads else _CUTS.get(module.rpartition(".")[2])
    replicated = "norm" in kind or (axis == _COLUMNS and kind == "bias")
    if axis is None or replicated or (module == "output_layer" and not entry.rule.vocabulary):
        yield Box.whole(shape)
        return
    parts = 2 if entry.rule.halves else 1
    length, rest = divmod(shape[axis] // parts, size)
    if rest or shape[axis] % parts:
        raise InvalidArgument(
            f"{entry.name}: axis {axis} with {shape[axis] // parts} elements cannot be cut into {size}"
        )
    for part in range(parts):
        offset, extent = [0] * len(shape), list(shape)
        offset[axis], extent[axis] = part * (shape[axis] // parts) + index * length, length
        yield Box(tuple(offset), tuple(extent))


def all_ranks(
    bridge: Bridge,
    tensors: Mapping[str, TensorSpec],
    world: int,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    stages: Stages | None = None,
) -> dict[int, Layout]:
    """Layouts of all ranks of a training job, by rank.

    Raises:
        InvalidArgument: the model cannot be divided by the sizes.
    """
    made: dict[MegatronRank, Layout] = {}
    layouts = {}
    for rank in range(world):
        at = MegatronRank.of_world(rank, world, tp=tp, pp=pp, ep=ep, etp=etp)
        # all replicas except the main one have the same layout
        key = replace(at, dp=min(at.dp, 1), expert_dp=min(at.expert_dp, 1))
        if key not in made:
            made[key] = megatron_layout(bridge, tensors, key, stages)
        layouts[rank] = made[key]
    return layouts
