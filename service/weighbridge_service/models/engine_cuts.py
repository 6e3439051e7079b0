"""Cuts of one tensor for a rank of an engine.

They follow the styles on which engines agree, or else the model's own parallel plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weighbridge._core.block_scales import scale_shape
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.slices import TensorParallel
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.engine_facts import CutFacts

_WHOLE, _COLWISE, _ROWWISE = "whole", "colwise", "rowwise"
_GATE_AND_UP, _STACKED_DOWN = "stacked gate and up", "stacked down"
_OUTPUTS = "the last axis"
_CORRECTIONS = tuple(
    (re.compile(pattern), style)
    for pattern, style in (
        # engines cut vision and audio encoders differently, and the encoders' heads differ from the decoder's
        (r"(.*\.)?(visual|vision_tower|vision_model|audio_tower)\..+", _WHOLE),
        # a score head has one or two rows
        (r"(.*\.)?(score|v_head|value_head|reward_head)\..+", _WHOLE),
        # multi-head latent attention: projections to the latent vector, which all heads share, are not cut
        (r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.\w+", _WHOLE),
        (r".*\.self_attn\.(q_b_proj|kv_b_proj)\.\w+", _COLWISE),
        # shared experts are an MLP; so are the other experts, regardless of transformers' plan for them
        (r".*\.(shared_experts?|experts\.\d+)\.(w1|w3|gate_proj|up_proj)\.\w+", _COLWISE),
        (r".*\.(shared_experts?|experts\.\d+)\.(w2|down_proj)\.\w+", _ROWWISE),
        # all experts of a layer in one tensor, input axis before output axis: [experts, hidden, gate and up], and
        # [experts, inner, hidden]
        (r".*\.experts\.gate_up_proj", _GATE_AND_UP),
        (r".*\.experts\.down_proj", _STACKED_DOWN),
        # their biases: [experts, gate and up]; the bias of a weight that is cut along the input axis is not cut
        (r".*\.experts\.gate_up_proj_bias", _OUTPUTS),
        (r".*\.experts\.down_proj_bias", _WHOLE),
        # an offset of the softmax for each head
        (r".*\.self_attn\.sinks", _COLWISE),
    )
)
"""Cuts on which engines agree, for tensors that transformers' plan omits or cuts differently.

The first matching pattern applies.
"""
_ROUTER = re.compile(r".*\.(gate|router|shared_expert_gate)\.\w+")
"""Routers, which choose the experts of a token. They are not cut, since every rank routes every token. A router has one
row for each expert, or a single row; other layers may be called a gate as well."""
_LATENT = {"q_proj": _COLWISE, "o_proj": _ROWWISE}
"""Other projections of multi-head latent attention, recognized by a ``kv_b_proj`` in the same module."""
_STYLES = {
    # these styles of transformers also define how activations are passed on, which does not affect the weights
    "colwise_rep": _COLWISE,
    "local_colwise": _COLWISE,
    "rowwise_rep": _ROWWISE,
    "local_rowwise": _ROWWISE,
}
_OF_ATTENTION = re.compile(r".*\.(self_attn\..+|mixer\.[qkvo]_proj\.\w+)")
"""Parameters of attention. Layers of hybrid models name attention, like their other kinds, a mixer."""

_DECODER = r"(?:model\.|language_model\.)*"
_PREDICTING = re.compile("^" + _DECODER + r"mtp([_.]layers\.\d+)?\.")
_AXES_OF_STACKED = {False: 3, True: 2}
"""Number of axes of tensors that hold all experts of a layer: weights (False), and biases (True)."""


def slices_of(facts: CutFacts, spec: TensorSpec, request: TensorParallel) -> tuple[tuple[int, ...], list[Box]]:
    """Shape of one tensor on the rank, with padding, and the rank's slices of it."""
    size, rank, experts = request.size, request.rank, request.experts
    style, stacked = _style(facts, spec), spec.name in facts.stacked
    if experts is not None and (stacked or facts.is_expert(spec.name)):
        size, rank = experts.tp_size, experts.tp_rank
    block = None
    if stacked and len(spec.shape) == _AXES_OF_STACKED[spec.name.endswith("_bias")] and experts is not None:
        block = _cut(spec, 0, experts.size, experts.rank, what="experts")
    if spec.name in facts.vocabulary and spec.shape[0] == facts.vocab_size:
        return _vocabulary(spec, style, request)
    if style == _GATE_AND_UP and len(spec.shape) == 3:
        if size == 1:
            return spec.shape, [block or Box.whole(spec.shape)]
        half = replace(spec, shape=(*spec.shape[:2], spec.shape[2] // 2))
        gate = _cut(half, 2, size, rank)
        up = Box((*gate.offset[:2], gate.offset[2] + half.shape[2]), gate.extent)
        return spec.shape, [_common(block, gate), _common(block, up)]
    if style == _COLWISE and size > 1 and spec.name in facts.sections:
        return spec.shape, list(_by_section(spec, facts.sections[spec.name], size, rank))
    if style == _OUTPUTS:
        return spec.shape, [_common(block, _cut(spec, len(spec.shape) - 1, size, rank))]
    if style == _STACKED_DOWN and len(spec.shape) == 3:
        return spec.shape, [_common(block, _cut(spec, 1, size, rank))]
    return spec.shape, [_common(block, _slice(facts, spec, style, size, rank))]


def _by_section(spec: TensorSpec, sections: Sequence[int], size: int, rank: int) -> Iterator[Box]:
    """The rank's rows of each section."""
    first = 0
    for rows in sections:
        cut = _cut(replace(spec, shape=(rows, *spec.shape[1:])), 0, size, rank)
        yield Box((first + cut.offset[0], *cut.offset[1:]), cut.extent)
        first += rows


def _style(facts: CutFacts, spec: TensorSpec) -> str:
    if _ROUTER.fullmatch(spec.name) and spec.shape[:1] in ((facts.experts_in_a_layer,), (1,)):
        return _WHOLE
    for pattern, style in _CORRECTIONS:
        if pattern.fullmatch(spec.name):
            # interleaved rows of gate and up are cut in their order
            return _OUTPUTS if spec.name in facts.alternating else style
    if facts.is_latent(spec.name):
        return _LATENT.get(spec.name.split(".")[-2], _WHOLE)
    # a layer for multi-token prediction is cut like a decoder layer, even if the plan does not contain it
    like = _PREDICTING.sub("model.layers.0.", spec.name, count=1)
    style = facts.plan.get(spec.name) or facts.plan.get(like) or _WHOLE
    return _STYLES.get(style, style)


def _vocabulary(spec: TensorSpec, style: str, request: TensorParallel) -> tuple[tuple[int, ...], list[Box]]:
    if request.vocab_multiple > 1:
        rows = math.ceil(spec.shape[0] / request.vocab_multiple) * request.vocab_multiple
        spec, style = replace(spec, shape=(rows, *spec.shape[1:])), _COLWISE
    if style != _COLWISE:
        return spec.shape, [Box.whole(spec.shape)]
    if spec.shape[0] % request.size:
        raise InvalidArgument(
            f"{spec}: a vocabulary of {spec.shape[0]} rows cannot be cut into {request.size}",
            fix=f"pass a vocab_multiple that {request.size} divides: engines pad the vocabulary with zeros, often to "
            "a multiple of 64",
        )
    return spec.shape, [_cut(spec, 0, request.size, request.rank)]


def _sizes_that_fit(facts: CutFacts) -> str:
    """Fix in an error about heads: lists the tensor-parallel sizes that the model supports."""
    sizes = [
        size
        for size in range(1, facts.heads + 1)
        if facts.heads % size == 0 and max(facts.kv_heads, size) % min(facts.kv_heads, size) == 0
    ]
    return f"use a tensor-parallel size of {', '.join(map(str, sizes))}"


def _slice(facts: CutFacts, spec: TensorSpec, style: str, size: int, rank: int) -> Box:
    """Slice of one tensor. A row-wise cut is along the input axis of the weight; its bias is not cut."""
    if style not in (_COLWISE, _ROWWISE) or (style == _ROWWISE and len(spec.shape) < 2):
        return Box.whole(spec.shape)
    axis = 0 if style == _COLWISE else 1
    if not _OF_ATTENTION.fullmatch(spec.name):
        return _cut(spec, axis, size, rank)
    # attention is cut between heads, never inside a head; if several ranks need a key-value head, each of them holds it
    module = spec.name.rpartition(".")[0]
    heads, kv_heads = facts.heads, facts.kv_heads
    if heads % size:
        raise InvalidArgument(
            f"{spec}: {heads} attention heads cannot be shared by {size} ranks", fix=_sizes_that_fit(facts)
        )
    if facts.is_latent(spec.name):
        return _cut(spec, axis, size, rank)
    if module.endswith(("k_proj", "v_proj", "k_norm")) and kv_heads < size:
        if size % kv_heads:
            raise InvalidArgument(
                f"{spec}: {kv_heads} key-value heads cannot be replicated over {size} ranks",
                fix=_sizes_that_fit(facts),
            )
        return _cut(spec, axis, kv_heads, rank * kv_heads // size)
    if kv_heads > size and kv_heads % size:
        raise InvalidArgument(
            f"{spec}: {kv_heads} key-value heads cannot be shared by {size} ranks", fix=_sizes_that_fit(facts)
        )
    return _cut(spec, axis, size, rank)


def _cut(spec: TensorSpec, axis: int, size: int, rank: int, what: str = "elements") -> Box:
    if spec.shape[axis] % size:
        raise InvalidArgument(f"{spec}: axis {axis} with {spec.shape[axis]} {what} cannot be cut into {size}")
    length = spec.shape[axis] // size
    offset, extent = [0] * len(spec.shape), list(spec.shape)
    offset[axis], extent[axis] = rank * length, length
    return Box(tuple(offset), tuple(extent))


def _common(one: Box | None, other: Box) -> Box:
    """Intersection of two cuts of one tensor along different axes; ``one`` may be None."""
    if one is None:
        return other
    offset = tuple(map(max, one.offset, other.offset))
    return Box(offset, tuple(map(min, one.extent, other.extent)))


def in_blocks(scale: TensorSpec, weight: TensorSpec, box: Box, block: tuple[int, int]) -> Box:
    """Box of the scales that belong to a part of an fp8 weight.

    Raises:
        InvalidArgument: the part ends inside a block, or the number of scales differs from the number of blocks.
    """
    blocks = [1] * (len(weight.shape) - 2) + list(block[-len(weight.shape) :])
    shown = " x ".join(map(str, block))
    if scale.shape != scale_shape(weight.shape, blocks):
        raise InvalidArgument(f"{scale} is not one scale for each {shown} block of {weight}")
    for start, end, n, b in zip(box.offset, box.end, weight.shape, blocks, strict=True):
        if start % b or (end % b and end != n):
            raise InvalidArgument(
                f"{scale}: the part {box} of {weight} ends inside a block of {shown} that has one scale",
                fix="use fewer ranks",
            )
    ends = [math.ceil(end / b) for end, b in zip(box.end, blocks, strict=True)]
    offset = tuple(start // b for start, b in zip(box.offset, blocks, strict=True))
    return Box(offset, tuple(end - start for end, start in zip(ends, offset, strict=True)))
