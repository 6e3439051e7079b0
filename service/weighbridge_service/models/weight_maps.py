"""Weight map of the tensors that a trainer declares.

Megatron-core names the same weight in several ways: one tensor for all layers with the layer as its first axis
(``decoder.layers.mlp.linear_fc2.weight``), one for each layer (``decoder.layers.3.mlp.linear_fc2.weight``); experts as
an axis (``mlp.experts.experts.linear_fc1.weight``) or one by one (``mlp.experts.experts.7.linear_fc1.weight``); with
``singleton_local_shards``, the two halves of a SwiGLU projection separately (``...linear_fc1.weight_w`` and ``_v``);
and the sections of the fused projection of a state space model separately (``mixer.in_proj.weight.z``). A bridge
contains one tensor for each layer and expert. This module relates the other forms to these tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weighbridge._core.boxes import Box, Link, subtract
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted
from weighbridge.errors import LayoutError
from weighbridge_service.families.rules import Shape
from weighbridge_service.models.bridges import Bridge, MegatronTensor
from weighbridge_service.plan.relations import WeightMap

_LAYERS = re.compile(r"^(.*\b(?:layers|deepstack_merger_list)\.)(?!\d)(.+)$")
_EXPERTS = re.compile(r"^(.*\.experts\.experts\.)(?!\d)(.+)$")
_MOST_PADDING, _PADDING = 2, 1 << 20
"""Maximum padding: the vocabulary may double, and a small vocabulary may grow to a million rows."""
_HALVES = {"_w": 0, "_v": 1}
_NAMED = 20


@dataclass(frozen=True, slots=True)
class _Part:
    """Declared tensor, or one layer and expert of it, as a part of a tensor of the bridge.

    Attributes:
        entry: the bridge's tensor.
        leading: index on the leading axes of the declared tensor; empty if it does not have leading axes.
        suffix: suffix of the declared tensor's name after the name of the bridge's tensor.
        box: the part of the bridge's tensor, without padding.
    """

    entry: MegatronTensor
    leading: tuple[int, ...]
    suffix: str
    box: Box


def derive_weight_map(
    bridge: Bridge, tensors: Mapping[str, TensorSpec], declared: Mapping[str, TensorSpec]
) -> WeightMap:
    """Weight map between the tensors that trainers declare and the Hugging Face model.

    Args:
        bridge: bridge of the model.
        tensors: the model's tensors in Hugging Face's space.
        declared: the union of the tensors that all ranks declare.

    Raises:
        LayoutError: a declared tensor is unknown, or its shape or dtype differs from the model's.
    """
    links: list[Link] = []
    copies: list[Link] = []
    padding: list[tuple[str, Box]] = []
    problems: list[str] = []
    seen: dict[str, Shape] = {}
    shifts: dict[str, float] = {}
    of_kind: dict[tuple[str, Shape, str], list[Link]] = {}
    for spec in declared.values():
        parts = list(_parts(bridge, spec))
        problem = _problem(bridge, tensors, spec, parts)
        if problem:
            problems.append(problem)
            continue
        if parts[0].entry.rule.shift:
            shifts[spec.name] = parts[0].entry.rule.shift
        for part in parts:
            entry = part.entry
            key = (entry.rule.megatron, entry.shape, part.suffix)
            cut = of_kind.get(key)
            if cut is None:
                cut = of_kind[key] = list(_cut(bridge.links(entry), part.box))
            for link in cut:
                target = entry.targets[int(link.target)]
                links.append(link.placed(spec.name, part.leading, target.name, target.leading))
            if entry.rule.every > 1:
                seen |= {target.name: entry.rule.seen(tensors[target.name].shape) for target in entry.targets}
            for copy in entry.rule.copies:
                copies += [link.placed(spec.name, part.leading, copy, ()) for link in cut]
        if parts[0].entry.rule.vocabulary and spec.shape != parts[0].entry.shape:
            held = Box.whole(parts[0].entry.shape)
            padding += [(spec.name, box) for box in subtract(Box.whole(spec.shape), [held])]
    if problems:
        raise LayoutError(
            counted(len(problems), "tensor contradicts the model", "tensors contradict the model"),
            details=problems[:_NAMED],
            fix="push the model's own sharded_state_dict() (no optimizer state), of the model that was registered, "
            "in the dtype it was registered with",
        )
    return WeightMap(declared, tensors, tuple(links), tuple(padding), tuple(copies), seen, shifts)


def registered_specs(
    bridge: Bridge, tensors: Mapping[str, TensorSpec], declared: Iterable[TensorSpec]
) -> Iterator[TensorSpec]:
    """Declared tensors in the dtypes of the model.

    Tensors that the model does not contain, or whose parts differ in dtype, are omitted.

    Args:
        bridge: bridge of the model.
        tensors: the model's tensors in Hugging Face's space.
        declared: tensors of a trainer, in its own dtypes.
    """
    for spec in declared:
        found = _dtypes(tensors, list(_parts(bridge, spec)))
        if len(found) == 1:
            yield replace(spec, dtype=found.pop())


def shifts_back(bridge: Bridge, declared: Mapping[str, TensorSpec]) -> Mapping[str, float]:
    """Constants to add to elements of declared tensors on the way from Hugging Face, by name. Tensors that the model
    does not contain are omitted.
    """
    first = {spec.name: next(_parts(bridge, spec), None) for spec in declared.values()}
    return {name: -part.entry.rule.shift for name, part in first.items() if part and part.entry.rule.shift}


def _problem(bridge: Bridge, tensors: Mapping[str, TensorSpec], spec: TensorSpec, parts: list[_Part]) -> str | None:
    """Error message about a declared tensor; None if it agrees with the model."""
    if not parts:
        return f"{spec} is not a tensor of this {bridge.model_type} model"
    wanted = _dtypes(tensors, parts)
    if wanted != {spec.dtype}:
        names = " and ".join(sorted(str(dtype) for dtype in wanted))
        advice = ""
        if spec.dtype.short == "fp32" and parts[0].entry.targets[0].name.endswith(bridge.keep_in_fp32 or ("\0",)):
            advice = "; Megatron-core always has it in float32, so import the model with it in float32"
        return f"{spec} has the wrong dtype: the model is registered with {names} there{advice}"
    entry = parts[0].entry
    if len({part.entry.rule.shift for part in parts}) > 1:
        return f"{spec} has parts to which the weight map adds different constants: declare them apart"
    if entry.rule.shift and not spec.dtype.is_float:
        return f"{spec} has the wrong dtype: the weight map adds {entry.rule.shift:g} to its elements"
    if entry.rule.vocabulary and spec.shape[1:] == entry.shape[1:] and len(spec.shape) == len(entry.shape):
        if spec.shape[0] > _MOST_PADDING * entry.shape[0] + _PADDING:
            return f"{spec} pads the vocabulary of {entry.shape[0]} to too many rows"
        if spec.shape[0] >= entry.shape[0]:
            return None
    for part in parts:
        expected = (*spec.shape[: len(part.leading)], *part.box.extent)
        if spec.shape != expected:
            return f"{spec} has the wrong shape: the model's is {list(expected)}"
    return None


def _dtypes(tensors: Mapping[str, TensorSpec], parts: list[_Part]) -> set[DType]:
    return {tensors[target.name].dtype for part in parts for target in part.entry.targets}


def _parts(bridge: Bridge, spec: TensorSpec) -> Iterator[_Part]:
    """Parts of the bridge's tensors that make up a declared tensor; none if it is unknown."""
    suffixes = [
        "",
        *(suffix for suffix in _HALVES if spec.name.endswith(suffix)),
        f".{spec.name.rpartition('.')[2]}",
    ]
    for suffix in suffixes:
        found = list(_stacked(bridge, spec.name.removesuffix(suffix), spec.shape))
        parts = [
            _Part(entry, leading, suffix, box)
            for leading, entry in found
            if entry is not None and (box := _part_named(entry, suffix)) is not None
        ]
        if parts and len(parts) == len(found):
            yield from parts
            return


def _part_named(entry: MegatronTensor, suffix: str) -> Box | None:
    """Part of a tensor whose name is the tensor's name with this suffix; None if it does not exist."""
    if not suffix:
        return None if entry.rule.sections else Box.whole(entry.shape)
    if suffix in _HALVES and entry.rule.halves:
        rows, rest = entry.shape[0] // len(_HALVES), entry.shape[1:]
        return Box((_HALVES[suffix] * rows, *(0 for _ in rest)), (rows, *rest))
    return next((box for name, box in entry.declared() if name == entry.name + suffix), None)


def _stacked(bridge: Bridge, name: str, shape: Shape) -> Iterator[tuple[tuple[int, ...], MegatronTensor | None]]:
    """Each index of the leading axes of stacked layers or experts, with its tensor; None if the model does not contain
    a tensor for the index.
    """
    by_layer, by_expert = _LAYERS.match(name), _EXPERTS.match(name)
    if not by_layer and not by_expert:
        yield (), bridge.find(name)
    elif not shape or not shape[0]:
        yield (), None
    elif by_layer:
        for layer in range(shape[0]):
            for rest, entry in _stacked(bridge, f"{by_layer[1]}{layer}.{by_layer[2]}", shape[1:]):
                yield (layer, *rest), entry
                if entry is None:  # later layers do not exist either, and a declared shape may be huge
                    return
        # a tensor must contain all layers; otherwise it is unknown
        if bridge.find(_first(f"{by_layer[1]}{shape[0]}.{by_layer[2]}")) is not None:
            yield (), None
    elif by_expert:
        for expert in range(shape[0]):
            entry = bridge.find(f"{by_expert[1]}{expert}.{by_expert[2]}")
            yield (expert,), entry
            if entry is None:
                return
        if bridge.find(f"{by_expert[1]}{shape[0]}.{by_expert[2]}") is not None:
            yield (), None


def _first(name: str) -> str:
    """Name of the first expert's tensor if the name stands for all experts; otherwise the name itself."""
    found = _EXPERTS.match(name)
    return f"{found[1]}0.{found[2]}" if found else name


def _cut(links: list[Link], box: Box) -> Iterator[Link]:
    """Links of a part of a tensor, relative to the part's origin."""
    for link in links:
        common = link.source_box.intersect(box)
        if common is not None:
            yield link._replace(source_box=common.relative_to(box.offset), target_box=link.to_target(common))
