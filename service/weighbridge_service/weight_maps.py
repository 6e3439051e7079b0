"""Which weight map belongs to the tensors that a trainer declares.

Megatron-core names the same weight in several ways: one tensor for all layers with the layer as its first axis
(``decoder.layers.mlp.linear_fc2.weight``), one for each layer (``decoder.layers.3.mlp.linear_fc2.weight``), and with
``singleton_local_shards`` the two halves of a SwiGLU projection apart (``...linear_fc1.weight_w`` and ``_v``). A
bridge knows the per-layer names; this module puts the others in relation to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weighbridge.boxes import Box, subtract
from weighbridge.dtypes import DType
from weighbridge.errors import LayoutError
from weighbridge.layouts import TensorSpec
from weighbridge_service.bridges import VOCABULARY_TENSORS, Bridge, kind_of
from weighbridge_service.relations import Link, WeightMap
from weighbridge_service.tracing import trace

_STACKED = re.compile(r"^(decoder\.layers\.)(?!\d)(.+)$")
_MOST_PADDING, _PADDING = 2, 1 << 20
"""Padding that is believed: the vocabulary may double, and a small one grow to a million rows; tracing needs memory for each."""
_HALVES = {"_w": 0, "_v": 1}


@dataclass(frozen=True, slots=True)
class _Part:
    """A declared tensor, or one layer of it, as a part of a per-layer tensor.

    Attributes:
        name: the per-layer name.
        leading: index on the leading axes of the declared tensor, empty if there are none.
        box: which part of the per-layer tensor it is.
    """

    name: str
    leading: tuple[int, ...]
    box: Box


def hugging_face_specs(bridge: Bridge, dtype: DType) -> dict[str, TensorSpec]:
    """The model's tensors in Hugging Face's space, with weights of this dtype."""
    return {name: replace(spec, dtype=dtype) for name, spec in bridge.hugging_face.items()}


def megatron_specs(bridge: Bridge, dtype: DType) -> dict[str, TensorSpec]:
    """The model's tensors in megatron-core's space, one for each layer, without padding."""
    return {
        name: TensorSpec(name, dtype, bridge.megatron_shape(name, bridge.vocab_size))
        for name in bridge.megatron
    }


def derive_weight_map(bridge: Bridge, dtype: DType, declared: Mapping[str, TensorSpec]) -> WeightMap:
    """The map between what trainers declare and the Hugging Face model.

    Args:
        bridge: knows the model's family and config.
        dtype: of the model's weights.
        declared: the union of what all ranks declare.

    Raises:
        LayoutError: a declared tensor is unknown, or has another shape or dtype than the model.
    """
    target = hugging_face_specs(bridge, dtype)
    links: list[Link] = []
    padding: list[tuple[str, Box]] = []
    problems: list[str] = []
    shapes: dict[tuple[str, int], tuple[int, ...]] = {}
    for spec in declared.values():
        parts = list(_parts(bridge, spec))
        if not parts:
            problems.append(f"{spec} is no tensor of this {bridge.model_type} model")
            continue
        if spec.dtype != dtype:
            problems.append(f"{spec} has the wrong dtype: the model is registered as {dtype}")
            continue
        if (
            parts[0].name in VOCABULARY_TENSORS
            and sum(spec.shape[:1]) > _MOST_PADDING * bridge.vocab_size + _PADDING
        ):
            problems.append(f"{spec} pads the vocabulary of {bridge.vocab_size} to too many rows")
            continue
        for part in parts:
            rows = spec.shape[0] if part.name in VOCABULARY_TENSORS and spec.shape else bridge.vocab_size
            kind = (kind_of(part.name), rows)
            if kind not in shapes:
                shapes[kind] = bridge.megatron_shape(part.name, max(rows, bridge.vocab_size))
            if kind not in bridge.traces:
                bridge.traces[kind] = _traced(bridge, part.name, shapes[kind], rows)
            part = _sized(part, shapes[kind])
            expected = (*spec.shape[: len(part.leading)], *part.box.extent)
            if spec.shape != expected:
                problems.append(f"{spec} has the wrong shape: the model's is {list(expected)}")
                break
            of_part = list(_links_of(spec.name, part, bridge.traces[kind], bridge.megatron[part.name]))
            links += of_part
            if rows > bridge.vocab_size:
                left = subtract(Box.whole(spec.shape), (link.source_box for link in of_part))
                padding += [(spec.name, box) for box in left]
    if problems:
        raise LayoutError(
            f"{len(problems)} declared tensors contradict the model",
            details=problems[:20],
            fix="push the model's own sharded_state_dict() (no optimizer state), of the model that was registered, "
            "in the dtype it was registered with",
        )
    return WeightMap(declared, target, tuple(links), tuple(padding))


def _parts(bridge: Bridge, spec: TensorSpec) -> Iterator[_Part]:
    """The per-layer tensors that a declared tensor is made of; none if it is unknown. Boxes are still empty."""
    for suffix in ("", *_HALVES):
        name = spec.name.removesuffix(suffix) if spec.name.endswith(suffix) else None
        if name is None:
            continue
        half = Box((_HALVES[suffix],), ()) if suffix else Box((), ())
        if name in bridge.megatron:
            yield _Part(name, (), half)
            return
        stacked = _STACKED.match(name)
        if stacked is None or spec.shape[:1] != (bridge.num_layers,):
            continue
        names = [f"{stacked[1]}{layer}.{stacked[2]}" for layer in range(bridge.num_layers)]
        if all(n in bridge.megatron for n in names):
            yield from (_Part(n, (layer,), half) for layer, n in enumerate(names))
            return


def _sized(part: _Part, shape: tuple[int, ...]) -> _Part:
    """The part with its box, now that the per-layer tensor's shape is known."""
    if not part.box.offset:
        return replace(part, box=Box.whole(shape))
    rows = shape[0] // len(_HALVES)
    return replace(part, box=Box((part.box.offset[0] * rows, *(0 for _ in shape[1:])), (rows, *shape[1:])))


def _traced(bridge: Bridge, name: str, shape: tuple[int, ...], rows: int) -> list[Link]:
    """Links of one kind of tensor; their targets are numbered, because the names differ from layer to layer."""
    numbers = {target: str(number) for number, target in enumerate(bridge.megatron[name])}
    links = trace(name, shape, bridge.conversion(name, max(rows, bridge.vocab_size)))
    return [replace(link, target=numbers[link.target]) for link in links]


def _links_of(declared: str, part: _Part, kind: list[Link], targets: tuple[str, ...]) -> Iterator[Link]:
    for link in kind:
        common = link.source_box.intersect(part.box)
        if common is None:
            continue
        yield Link(
            declared,
            common.relative_to(part.box.offset),
            targets[int(link.target)],
            link.to_target(common),
            link.axes,
        ).under(part.leading)
