"""Which slices a rank holds: an engine's by the model's own parallel plan, a trainer's as Megatron-core cuts them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weighbridge.boxes import Box
from weighbridge.dtypes import DType
from weighbridge.errors import InvalidArgument, NotFound
from weighbridge.layouts import Layout, Shard, TensorSpec
from weighbridge.slices import Boxes, FullTensors, LayoutRequest, TensorParallel
from weighbridge_service.bridges import VOCABULARY_TENSORS, Bridge, kind_of
from weighbridge_service.weight_maps import megatron_specs

MAX_BOXES = 1_000_000
"""Most boxes in one request."""

_ROWS, _COLUMNS = 0, 1
_MEGATRON_CUTS = {
    # kinds of megatron-core tensors that tensor parallelism cuts, and along which axis; the others are replicated
    "embedding.word_embeddings.weight": _ROWS,
    "output_layer.weight": _ROWS,
    "decoder.layers.{layer}.self_attention.linear_qkv.weight": _ROWS,
    "decoder.layers.{layer}.self_attention.linear_qkv.bias": _ROWS,
    "decoder.layers.{layer}.self_attention.linear_proj.weight": _COLUMNS,
    "decoder.layers.{layer}.mlp.linear_fc1.weight": _ROWS,
    "decoder.layers.{layer}.mlp.linear_fc1.bias": _ROWS,
    "decoder.layers.{layer}.mlp.linear_fc2.weight": _COLUMNS,
}
_GATED = ("decoder.layers.{layer}.mlp.linear_fc1.weight", "decoder.layers.{layer}.mlp.linear_fc1.bias")
"""All gate rows, then all up rows: a rank holds a piece of each."""


def engine_layout(bridge: Bridge, tensors: Mapping[str, TensorSpec], request: LayoutRequest) -> Layout:
    """The stream of slices that a request asks for.

    Raises:
        InvalidArgument: the request does not fit the model; names the tensor.
        NotFound: it names a tensor that the model does not have.
    """
    match request:
        case FullTensors(names=names):
            for name in names:
                _known(tensors, name)
            return _stream([(spec, Box.whole(spec.shape)) for spec in _chosen(tensors, names)])
        case TensorParallel(size=size, rank=rank):
            _check_rank("tensor-parallel", size, rank)
            plan = bridge.parallel_plan()
            return _stream(
                [(spec, _slice(bridge, spec, plan.get(spec.name), size, rank)) for spec in tensors.values()]
            )
        case Boxes(boxes=boxes):
            if len(boxes) > MAX_BOXES:
                raise InvalidArgument(f"{len(boxes)} boxes in one request are more than {MAX_BOXES}")
            found = [
                (_known(tensors, name), Box(tuple(offset), tuple(extent))) for name, offset, extent in boxes
            ]
            for spec, box in found:
                if not box.fits(spec.shape) or box.volume == 0:
                    raise InvalidArgument(
                        f"{spec}: box {list(box.offset)} + {list(box.extent)} does not fit into it"
                    )
            return _stream(found)


def _chosen(tensors: Mapping[str, TensorSpec], names: Sequence[str]) -> list[TensorSpec]:
    return [tensors[name] for name in names] if names else list(tensors.values())


def _known(tensors: Mapping[str, TensorSpec], name: str) -> TensorSpec:
    if name not in tensors:
        raise NotFound(
            f"the model has no tensor {name[:200]!r}",
            fix="`weighbridge show MODEL --tensors` lists them (Hugging Face's names)",
        )
    return tensors[name]


def _stream(slices: Sequence[tuple[TensorSpec, Box]]) -> Layout:
    return Layout.stream((spec for spec, _ in slices), [Shard(spec.name, box) for spec, box in slices])


def _check_rank(what: str, size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise InvalidArgument(
            f"{what} rank {rank} of {size} does not exist", fix="ranks count from 0 to size - 1"
        )


def _slice(bridge: Bridge, spec: TensorSpec, style: str | None, size: int, rank: int) -> Box:
    """The slice of one tensor. A row-wise cut is along the input axis of the weight; its bias is not cut."""
    if style not in ("colwise", "rowwise") or (style == "rowwise" and len(spec.shape) < 2):
        return Box.whole(spec.shape)
    axis = _ROWS if style == "colwise" else _COLUMNS
    heads, kv_heads = bridge.head_counts()
    if ".self_attn." not in spec.name:
        return _cut(spec, axis, size, rank)
    # attention is cut between heads, never inside one; a key-value head that several ranks need is on each of them
    if heads % size:
        raise InvalidArgument(f"{spec}: {heads} attention heads cannot be shared by {size} ranks")
    if spec.name.rpartition(".")[0].endswith(("k_proj", "v_proj")) and kv_heads < size:
        if size % kv_heads:
            raise InvalidArgument(
                f"{spec}: {kv_heads} key-value heads cannot be replicated over {size} ranks"
            )
        return _cut(spec, axis, kv_heads, rank * kv_heads // size)
    if kv_heads > size and kv_heads % size:
        raise InvalidArgument(f"{spec}: {kv_heads} key-value heads cannot be shared by {size} ranks")
    return _cut(spec, axis, size, rank)


def _cut(spec: TensorSpec, axis: int, size: int, rank: int) -> Box:
    if spec.shape[axis] % size:
        raise InvalidArgument(
            f"{spec}: axis {axis} with {spec.shape[axis]} elements cannot be cut into {size}"
        )
    length = spec.shape[axis] // size
    offset, extent = [0] * len(spec.shape), list(spec.shape)
    offset[axis], extent[axis] = rank * length, length
    return Box(tuple(offset), tuple(extent))


def megatron_layout(
    bridge: Bridge, dtype: DType, tp_size: int, tp_rank: int, pp_size: int, pp_rank: int
) -> Layout:
    """The shards that a Megatron-core rank holds, per-layer keys, layers spread evenly over pipeline stages.

    Vocabulary tensors are padded to a multiple of the tensor-parallel size.

    Raises:
        InvalidArgument: the sizes do not divide the model, or the rank does not exist.
    """
    _check_rank("tensor-parallel", tp_size, tp_rank)
    _check_rank("pipeline-parallel", pp_size, pp_rank)
    if bridge.num_layers % pp_size:
        raise InvalidArgument(
            f"{bridge.num_layers} layers cannot be spread evenly over {pp_size} pipeline stages"
        )
    padded = math.ceil(bridge.vocab_size / tp_size) * tp_size
    per_stage = bridge.num_layers // pp_size
    stage = range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
    tied = "output_layer.weight" not in bridge.megatron
    heads, kv_heads = bridge.head_counts()
    if heads % tp_size or kv_heads % tp_size:
        raise InvalidArgument(
            f"{heads} heads with {kv_heads} key-value heads cannot be shared by {tp_size} ranks"
        )
    slices: list[tuple[TensorSpec, Box]] = []
    for name, spec in megatron_specs(bridge, dtype).items():
        kind = kind_of(name)
        if name == "embedding.word_embeddings.weight":
            here = pp_rank == 0 or (tied and pp_rank == pp_size - 1)
        elif kind == name:  # not of a layer: the final norm, the output layer
            here = pp_rank == pp_size - 1
        else:
            here = int(name.split(".")[2]) in stage
        if not here:
            continue
        if name in VOCABULARY_TENSORS:
            spec = replace(spec, shape=(padded, *spec.shape[1:]))
        axis = _MEGATRON_CUTS.get(kind)
        if axis is None:
            slices.append((spec, Box.whole(spec.shape)))
        elif kind in _GATED:
            half = spec.shape[0] // 2
            gate = _cut(replace(spec, shape=(half, *spec.shape[1:])), _ROWS, tp_size, tp_rank)
            up = Box((gate.offset[0] + half, *gate.offset[1:]), gate.extent)
            slices += [(spec, gate), (spec, up)]
        else:
            slices.append((spec, _cut(spec, axis, tp_size, tp_rank)))
    return _stream(slices)
