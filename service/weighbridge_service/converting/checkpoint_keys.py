"""Keys, chunks and objects of a checkpoint for Megatron-core to load.

Keys are those of `sharded_state_dict()` of megatron-core 0.16. If all layers are identical (`homogeneous` in
transformer_block.py), they form one tensor with the layer as its first axis; otherwise each layer has its own key. A
layer's experts are always an axis of one tensor. Layers for multi-token prediction have their own keys in both forms.
Every module that Transformer Engine could quantise also has an object ``<module>._extra_state``, without which loading
fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weighbridge._core.boxes import Box
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Shard, TensorSpec
from weighbridge._trainers.torch_dist.chunks import chunks_of
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridges import Bridge, MegatronTensor

KeyForm = Literal["auto", "stacked", "per-layer"]
LayerSpec = Literal["te", "local"]

_LAYER = re.compile(r"^((?:.*\.)?decoder\.(?:layers|deepstack_merger_list)\.)(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*\.experts\.experts\.)(\d+)\.(.+)$")
_ATTENTION = re.compile(r"^(.*\.self_attention)\.linear_proj\.weight$")
_MLP_NORM = ".mlp.linear_fc1.layer_norm_weight"
_MOE_NORM = ".pre_mlp_layernorm.weight"
_MORE_LINEAR = ("eh_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")
_LATENT = ".self_attention.linear_kv_up_proj.weight"
_LATENT_NORMS = {
    ".self_attention.linear_q_up_proj.layer_norm_weight": ".self_attention.q_layernorm.weight",
    ".self_attention.linear_kv_up_proj.layer_norm_weight": ".self_attention.kv_layernorm.weight",
}


@dataclass(frozen=True)
class CheckpointTensors:
    """Entries of a checkpoint.

    Attributes:
        specs: specs of all tensors.
        shards: chunks of the tensors, in the order of the model.
        objects: names of the entries that are not tensors.
    """

    specs: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of one layer and expert, or a section of it, with its place. The place is a key that ends with the
    section, and an index of the leading axes.
    """

    entry: MegatronTensor
    dtype: DType
    key: str
    leading: tuple[int, ...]
    section: str
    shape: tuple[int, ...]


def checkpoint_tensors(
    bridge: Bridge,
    tensors: Mapping[str, TensorSpec],
    *,
    keys: KeyForm = "auto",
    spec: LayerSpec = "te",
    vocab_multiple: int = 128,
) -> CheckpointTensors:
    """The tensors, chunks and objects of a checkpoint.

    Args:
        bridge: bridge of the model.
        tensors: the model's tensors in Hugging Face's space, which determine the dtypes.
        keys: ``stacked`` gives all layers one key, ``per-layer`` gives each layer its own key. ``auto`` follows the
            trainers of the family, and stacks layers only if all of them are identical.
        spec: naming of norms: Transformer Engine's, or Megatron's own.
        vocab_multiple: the rows of the embedding and of the output layer are padded to a multiple of this.

    Raises:
        InvalidArgument: ``keys`` is ``stacked``, but the layers differ; or parts of one key differ in dtype or shape.
    """
    placed = []
    for name, entry in _named(bridge, spec):
        expert = _EXPERT.match(name)
        key, leading = (f"{expert[1]}{expert[3]}", (int(expert[2]),)) if expert else (name, ())
        dtype = tensors[entry.targets[0].name].dtype
        for declared, part in entry.declared():
            section = declared.removeprefix(entry.name)
            placed.append(_Placed(entry, dtype, key + section, leading, section, part.extent))
    if keys == "stacked" or (keys == "auto" and bridge.one_key_for_all_layers):
        placed = _stacked(placed, must=keys == "stacked")
    counts: dict[str, tuple[int, ...]] = {}
    for one in placed:
        there = counts.get(one.key, (0,) * len(one.leading))
        counts[one.key] = tuple(max(n, i + 1) for n, i in zip(there, one.leading, strict=True))
    specs: dict[str, TensorSpec] = {}
    shards: list[Shard] = []
    for one in placed:
        shape = one.shape
        if one.entry.rule.vocabulary:
            shape = (math.ceil(shape[0] / vocab_multiple) * vocab_multiple, *shape[1:])
        made = TensorSpec(one.key, one.dtype, (*counts[one.key], *shape))
        if specs.setdefault(one.key, made) != made:
            raise InvalidArgument(
                f"parts of {one.key} differ: {specs[one.key]} and {made}",
                fix="save the model in one dtype, or convert with a key for each layer",
            )
        shards += [
            Shard(one.key, box.under(one.leading)) for box in _chunks(one.entry, TensorSpec(one.key, one.dtype, shape))
        ]
    return CheckpointTensors(tuple(specs.values()), tuple(shards), tuple(dict.fromkeys(_objects(placed, counts, spec))))


def _named(bridge: Bridge, spec: LayerSpec) -> Iterator[tuple[str, MegatronTensor]]:
    """The model's tensors under their names in a layer spec."""
    own_names = {theirs: ours for ours, theirs in _LATENT_NORMS.items()}
    for name, entry in bridge.megatron.items():
        for one, other in (_LATENT_NORMS if spec == "local" else own_names).items():
            layer = name.removesuffix(one)
            if layer != name and f"{layer}{_LATENT}" in bridge.megatron:
                name = layer + other
        if spec == "local":
            for suffix in (_MLP_NORM, _MOE_NORM):
                layer = name.removesuffix(suffix)
                if layer != name:
                    name = layer + (_MOE_NORM if f"{layer}{_LATENT}" in bridge.megatron else _MLP_NORM)
                    break
        yield name, entry


def _stacked(placed: Sequence[_Placed], *, must: bool) -> list[_Placed]:
    """The same tensors, with one key for all layers of each stack whose layers are identical."""
    stacks: dict[str, dict[int, dict[tuple[str, tuple[int, ...]], object]]] = {}
    for one in placed:
        found = _LAYER.match(one.key)
        if found:
            layer = stacks.setdefault(found[1], {}).setdefault(int(found[2]), {})
            layer[found[3], one.leading] = one.shape, one.dtype
    alike = {
        stack
        for stack, layers in stacks.items()
        if sorted(layers) == list(range(len(layers))) and all(layer == layers[0] for layer in layers.values())
    }
    if must and alike != stacks.keys():
        raise InvalidArgument(
            (
                f"the layers of {' and '.join(sorted(stacks.keys() - alike))} are not all alike, "
                "so they cannot have one key"
            ),
            fix="convert with a key for each layer, as Megatron-core saves such a model",
        )
    made = []
    for one in placed:
        found = _LAYER.match(one.key)
        if found and found[1] in alike:
            key, leading = found[1] + found[3], (int(found[2]), *one.leading)
            one = replace(one, key=key, leading=leading)
        made.append(one)
    return made


def _chunks(entry: MegatronTensor, spec: TensorSpec) -> Iterator[Box]:
    """Chunks of a tensor. Its halves are separate chunks, because tensor parallelism splits each half separately."""
    if not (entry.rule.halves and spec.nbytes and spec.shape[0] % 2 == 0):
        yield from (shard.box for shard in chunks_of(spec))
        return
    rows, *rest = spec.shape
    for first in (0, rows // 2):
        for shard in chunks_of(replace(spec, shape=(rows // 2, *rest))):
            row, *others = shard.box.offset
            yield shard.box._replace(offset=(first + row, *others))


def _objects(placed: Sequence[_Placed], counts: Mapping[str, tuple[int, ...]], spec: LayerSpec) -> Iterator[str]:
    """Names of the extra states of a model: those of linear layers and, with Transformer Engine, also those of norms
    and attention.
    """
    for one in placed:
        offset, size = one.leading or (0,), counts[one.key] or (1,)
        where = f"_extra_state/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, size))}"
        module, _, kind = one.key.removesuffix(one.section).rpartition(".")
        last = module.rpartition(".")[2]
        if kind == "weight" and (last.startswith("linear_") or last in _MORE_LINEAR):
            yield f"{module}.{where}"
        attention = _ATTENTION.match(one.key)
        if spec == "te" and attention:
            yield f"{attention[1]}.core_attention.{where}"
        # norms that tensor parallelism splits are not modules of Transformer Engine
        if spec == "te" and kind == "weight" and last.endswith("norm") and not one.entry.rule.by_heads:
            yield f"{module}.{where}"
