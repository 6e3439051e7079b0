"""Layouts of engine ranks: whole tensors, the slices of a rank by the model's own parallel plan, or explicit boxes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weighbridge._core.block_scales import DEFAULT_BLOCK, SCALE_SUFFIX, scale_shape
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.slices import Boxes, ExpertParallel, FullTensors, LayoutRequest, TensorParallel
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import InvalidArgument, NotFound
from weighbridge_service.models.bridges import Bridge, kind_of
from weighbridge_service.models.megatron_layouts import BEHIND_THE_LAYERS, place_of

MAX_BOXES = 1_000_000
"""Most boxes in one request."""

_WHOLE, _COLWISE, _ROWWISE = "whole", "colwise", "rowwise"
_GATE_AND_UP, _STACKED_DOWN = "stacked gate and up", "stacked down"
_OUTPUTS = "the last axis"
_CORRECTIONS = tuple(
    (re.compile(pattern), style)
    for pattern, style in (
        # engines differ in how they cut what reads images and sounds, and its heads are others than the decoder's
        (r"(.*\.)?(visual|vision_tower|vision_model|audio_tower)\..+", _WHOLE),
        # a score is a row or two
        (r"(.*\.)?(score|v_head|value_head|reward_head)\..+", _WHOLE),
        # multi-head latent attention: what goes from or to the latent vector, which all heads share, is not cut
        (r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.\w+", _WHOLE),
        (r".*\.self_attn\.(q_b_proj|kv_b_proj)\.\w+", _COLWISE),
        # shared experts are an MLP; the others are too, whatever transformers does with them
        (r".*\.(shared_experts?|experts\.\d+)\.(w1|w3|gate_proj|up_proj)\.\w+", _COLWISE),
        (r".*\.(shared_experts?|experts\.\d+)\.(w2|down_proj)\.\w+", _ROWWISE),
        # all experts of a layer in one tensor, input axis before output axis: [experts, hidden, gate and up], and
        # [experts, inner, hidden]
        (r".*\.experts\.gate_up_proj", _GATE_AND_UP),
        (r".*\.experts\.down_proj", _STACKED_DOWN),
        # their biases: [experts, gate and up]; that of what is cut along the input axis is not cut
        (r".*\.experts\.gate_up_proj_bias", _OUTPUTS),
        (r".*\.experts\.down_proj_bias", _WHOLE),
        # an offset of the softmax for each head
        (r".*\.self_attn\.sinks", _COLWISE),
    )
)
"""How tensors are cut where engines agree and transformers' plan is silent or has another scheme; the first one counts."""
_ROUTER = re.compile(r".*\.(gate|router|shared_expert_gate)\.\w+")
"""What says which expert a token goes to: every rank routes every token. With one row for each expert, or one alone; other
layers may be called a gate as well."""
_LATENT = {"q_proj": _COLWISE, "o_proj": _ROWWISE}
"""The other projections of multi-head latent attention, known by the ``kv_b_proj`` beside them."""
_STYLES = {
    # transformers says with these how activations go on from there, which is no matter of the weights
    "colwise_rep": _COLWISE,
    "local_colwise": _COLWISE,
    "rowwise_rep": _ROWWISE,
    "local_rowwise": _ROWWISE,
}
_OF_ATTENTION = re.compile(r".*\.(self_attn\..+|mixer\.[qkvo]_proj\.\w+)")
"""What attention consists of; layers of hybrid models call whatever they have a mixer."""
_LATENT_KIND = " (latent)"

_DECODER = r"(?:model\.|language_model\.)*"
_PREDICTING = re.compile("^" + _DECODER + r"mtp([_.]layers\.\d+)?\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..+")
_AXES_OF_STACKED = {False: 3, True: 2}
"""Of tensors that hold all experts of a layer: weights, and biases."""
_STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)(_bias)?")


class EngineLayouts:
    """What engines can ask for of a model.

    Args:
        tensors: the model's tensors, by name.
        bridge: gives what is known of its family, the parallel plan among it, or says that nothing is; asked for ranks' slices only.
        block: rows and columns of an fp8 weight that share a scale.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        bridge: Callable[[], Bridge],
        block: tuple[int, int] = DEFAULT_BLOCK,
    ) -> None:
        self._bridge = bridge
        self._tensors = tensors
        self._block = block

    @cached_property
    def _facts(self) -> _Facts:
        return _facts(self._bridge(), self._tensors, self._block)

    def layout(self, request: LayoutRequest) -> Layout:
        """The stream of slices that a request asks for.

        A tensor of the vocabulary that is padded has its padded shape in it.

        Raises:
            InvalidArgument: the request does not fit the model; names the tensor. Or there is no plan for ranks of this model type.
            NotFound: it names a tensor that the model does not have.
        """
        match request:
            case FullTensors(names=names):
                specs = [self._known(name) for name in names] or list(self._tensors.values())
                return _stream([(spec, Box.whole(spec.shape)) for spec in specs])
            case TensorParallel():
                return _stream(list(_rank(self._facts, request)))
            case Boxes(boxes=boxes):
                if len(boxes) > MAX_BOXES:
                    raise InvalidArgument(f"{len(boxes)} boxes in one request are more than {MAX_BOXES}")
                named = {name: self._known(name) for name in dict.fromkeys(name for name, _, _ in boxes)}
                shards = [Shard(name, Box(tuple(offset), tuple(extent))) for name, offset, extent in boxes]
                layout = Layout.stream(named.values(), shards)
                empty = next((p.shard for p in layout.placements if p.nbytes == 0), None)
                if empty is not None:
                    raise InvalidArgument(f"{named[empty.tensor]}: box {empty.box} is empty")
                return layout

    def _known(self, name: str) -> TensorSpec:
        if name not in self._tensors:
            raise NotFound(
                f"the model has no tensor {name[:200]!r}{did_you_mean(name[:200], self._tensors)}",
                fix="`weighbridge show MODEL --tensors` lists them (Hugging Face's names)",
            )
        return self._tensors[name]


def padding_of(source: Layout, target: Layout) -> list[tuple[str, Box]]:
    """The rows by which tensors are longer in an engine's layout than in the files."""
    return [
        (name, Box((rows, *(0 for _ in spec.shape[1:])), (spec.shape[0] - rows, *spec.shape[1:])))
        for name, spec in target.tensors.items()
        for rows in source.tensors[name].shape[:1]
        if spec.shape[0] > rows
    ]


def _stream(slices: Sequence[tuple[TensorSpec, Box]]) -> Layout:
    return Layout.stream(
        {spec.name: spec for spec, _ in slices}.values(), [Shard(s.name, b) for s, b in slices]
    )


@dataclass(frozen=True)
class _Facts:
    """What the cuts need to know of a model.

    Attributes:
        model_type: of its config.
        tensors: by name.
        plan: its own parallel plan.
        heads: attention heads.
        kv_heads: key-value heads.
        num_layers: decoder layers.
        vocab_size: rows of the embedding.
        experts_in_a_layer: routed experts; 0 if there are none.
        experts: how many there are, by the name they are under.
        of_expert: the tensors of one expert, by the name it is under and its number; each with its place in the order.
        common: the other tensors, in the same form.
        stacked: the tensors that hold all experts of a layer.
        sections: rows of the sections of tensors that are cut section by section.
        alternating: tensors in which rows of gate and up take turns along the last axis.
        kinds: of which kind each tensor is; those of one kind and shape are cut alike.
        latent: where attention is multi-head latent attention, as the names of its modules.
        block: rows and columns of an fp8 weight that share a scale.
        places: the decoder layer of each tensor, or its place before or behind the layers.
        vocabulary: tensors whose first axis is the vocabulary.
        output_too: tensors that are before the layers and behind them: an embedding that is the output layer too.
    """

    model_type: str
    tensors: Mapping[str, TensorSpec]
    plan: Mapping[str, str]
    heads: int
    kv_heads: int
    num_layers: int
    vocab_size: int
    experts_in_a_layer: int
    experts: Mapping[str, int]
    of_expert: Mapping[tuple[str, int], Sequence[tuple[int, str]]]
    common: Sequence[tuple[int, str]]
    stacked: frozenset[str]
    sections: Mapping[str, Sequence[int]]
    alternating: frozenset[str]
    kinds: Mapping[str, str]
    latent: frozenset[str]
    block: tuple[int, int]
    places: Mapping[str, int]
    vocabulary: frozenset[str]
    output_too: frozenset[str]


def _facts(bridge: Bridge, tensors: Mapping[str, TensorSpec], block: tuple[int, int]) -> _Facts:
    experts: dict[str, int] = {}
    of_expert: dict[tuple[str, int], list[tuple[int, str]]] = {}
    common: list[tuple[int, str]] = []
    for place, name in enumerate(tensors):
        found = _EXPERT.fullmatch(name) if ".experts." in name else None
        if found:
            of_expert.setdefault((found[1], int(found[2])), []).append((place, name))
            experts[found[1]] = max(experts.get(found[1], 0), int(found[2]) + 1)
        else:
            common.append((place, name))
    heads, kv_heads = bridge.head_counts()
    latent = {name.rpartition(".kv_b_proj.")[0] for _, name in common if ".self_attn.kv_b_proj." in name}
    return _Facts(
        bridge.model_type,
        tensors,
        bridge.parallel_plan(),
        heads,
        kv_heads,
        bridge.num_layers,
        bridge.vocab_size,
        bridge.experts,
        experts,
        of_expert,
        common,
        frozenset(name for _, name in common if _STACKED.fullmatch(name)),
        {
            entry.targets[0].name: [section.rows for section in entry.rule.sections]
            for entry in bridge.megatron.values()
            if entry.rule.sections and len(entry.targets) == 1
        },
        frozenset(
            target.name
            for entry in bridge.megatron.values()
            if entry.rule.every > 1
            for target in entry.targets
        ),
        {name: kind_of(name) + _LATENT_KIND * (_attention(name) in latent) for name in tensors},
        frozenset(latent),
        block,
        *_places(bridge),
    )


def _places(bridge: Bridge) -> tuple[dict[str, int], frozenset[str], frozenset[str]]:
    """Where Hugging Face's tensors belong, which are of the vocabulary, and which the last stage has as well."""
    places: dict[str, int] = {}
    vocabulary: set[str] = set()
    embedding: set[str] = set()
    untied = False
    for name, entry in bridge.megatron.items():
        place = place_of(name)
        for target in entry.targets:
            places[target.name] = place
        # what a model has a second time is for its layers that predict further tokens
        places |= dict.fromkeys(entry.rule.copies, BEHIND_THE_LAYERS)
        if entry.rule.vocabulary:
            vocabulary |= {*(target.name for target in entry.targets), *entry.rule.copies}
        if name.endswith("word_embeddings.weight"):
            embedding |= {target.name for target in entry.targets}
        untied = untied or name.endswith("output_layer.weight")
    return places, frozenset(vocabulary), frozenset(() if untied else embedding)


def _rank(facts: _Facts, request: TensorParallel) -> Iterator[tuple[TensorSpec, Box]]:
    """What one rank of an engine holds."""
    if request.layers is not None and request.layers[1] > facts.num_layers:
        raise InvalidArgument(
            f"layers {request.layers[0]}:{request.layers[1]} are not all there: the model has {facts.num_layers}"
        )
    experts = request.experts
    if experts is not None and not (facts.experts or facts.stacked):
        raise InvalidArgument("the model has no experts to be spread", fix="ask without expert parallelism")
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], list[Box]]] = {}
    cut = False
    for spec in _held(facts, experts):
        if request.layers is not None and not _of_stage(facts, spec.name, request.layers):
            continue
        weight = (
            facts.tensors.get(spec.name.removesuffix(SCALE_SUFFIX), spec)
            if spec.name.endswith(SCALE_SUFFIX)
            else spec
        )
        kind = facts.kinds[spec.name], spec.shape, weight.shape
        found = alike.get(kind)
        if found is None:
            shape, boxes = _slices(facts, weight, request)
            if weight is not spec:
                shape, boxes = spec.shape, [_in_blocks(spec, weight, box, facts.block) for box in boxes]
            found = alike[kind] = shape, boxes
        shape, boxes = found
        cut = cut or (boxes[0].extent != shape and weight.name not in facts.vocabulary)
        held = spec if shape == spec.shape else replace(spec, shape=shape)
        for box in boxes:
            yield held, box
    if request.size > 1 and not cut:
        raise InvalidArgument(
            f"nothing of a {facts.model_type} model but its vocabulary would be cut for {request.size} ranks",
            fix="the family's parallel_plan() has to name its modules (docs/families.md); or pull explicit boxes",
        )


def _held(facts: _Facts, experts: ExpertParallel | None) -> Iterable[TensorSpec]:
    """The tensors that a rank has something of, whatever its pipeline stage, in their order."""
    if experts is None or not facts.experts:
        return facts.tensors.values()
    held = list(facts.common)
    for under, count in facts.experts.items():
        if count % experts.size:
            raise InvalidArgument(f"{under}: {count} experts cannot be spread over {experts.size} ranks")
        each = count // experts.size
        for expert in range(experts.rank * each, (experts.rank + 1) * each):
            held += facts.of_expert[under, expert]
    return [facts.tensors[name] for _, name in sorted(held)]


def _of_stage(facts: _Facts, name: str, layers: tuple[int, int]) -> bool:
    """Whether a tensor is on a pipeline stage."""
    is_first, is_last = layers[0] == 0, layers[1] == facts.num_layers
    place = facts.places[name.removesuffix(SCALE_SUFFIX)]
    if place >= 0:
        return layers[0] <= place < layers[1]
    if place == BEHIND_THE_LAYERS:
        return is_last
    return is_first or (is_last and name in facts.output_too)


def _slices(facts: _Facts, spec: TensorSpec, request: TensorParallel) -> tuple[tuple[int, ...], list[Box]]:
    """The slices of one tensor that is on the rank; and its shape, padded if it is."""
    size, rank, experts = request.size, request.rank, request.experts
    style, stacked = _style(facts, spec), spec.name in facts.stacked
    if experts is not None and (stacked or _EXPERT.fullmatch(spec.name)):
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
    """A cut of each section of the rows."""
    first = 0
    for rows in sections:
        cut = _cut(replace(spec, shape=(rows, *spec.shape[1:])), 0, size, rank)
        yield Box((first + cut.offset[0], *cut.offset[1:]), cut.extent)
        first += rows


def _style(facts: _Facts, spec: TensorSpec) -> str:
    if _ROUTER.fullmatch(spec.name) and spec.shape[:1] in ((facts.experts_in_a_layer,), (1,)):
        return _WHOLE
    for pattern, style in _CORRECTIONS:
        if pattern.fullmatch(spec.name):
            # what takes turns is cut as it lies
            return _OUTPUTS if spec.name in facts.alternating else style
    if _attention(spec.name) in facts.latent:
        return _LATENT.get(spec.name.split(".")[-2], _WHOLE)
    # a layer that predicts further tokens is cut like one of the decoder, also where the plan does not speak of it
    like = _PREDICTING.sub("model.layers.0.", spec.name, count=1)
    style = facts.plan.get(spec.name) or facts.plan.get(like) or _WHOLE
    return _STYLES.get(style, style)


def _attention(name: str) -> str:
    """The module two levels above a parameter: of the weights of its projections, the attention."""
    return name.rpartition(".")[0].rpartition(".")[0]


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


def _sizes_that_fit(facts: _Facts) -> str:
    """What to do where heads cannot be shared."""
    sizes = [
        size
        for size in range(1, facts.heads + 1)
        if facts.heads % size == 0 and max(facts.kv_heads, size) % min(facts.kv_heads, size) == 0
    ]
    return f"use a tensor-parallel size of {', '.join(map(str, sizes))}"


def _slice(facts: _Facts, spec: TensorSpec, style: str, size: int, rank: int) -> Box:
    """The slice of one tensor. A row-wise cut is along the input axis of the weight; its bias is not cut."""
    if style not in (_COLWISE, _ROWWISE) or (style == _ROWWISE and len(spec.shape) < 2):
        return Box.whole(spec.shape)
    axis = 0 if style == _COLWISE else 1
    if not _OF_ATTENTION.fullmatch(spec.name):
        return _cut(spec, axis, size, rank)
    # attention is cut between heads, never inside one; a key-value head that several ranks need is on each of them
    module = spec.name.rpartition(".")[0]
    heads, kv_heads = facts.heads, facts.kv_heads
    if heads % size:
        raise InvalidArgument(
            f"{spec}: {heads} attention heads cannot be shared by {size} ranks", fix=_sizes_that_fit(facts)
        )
    if _attention(spec.name) in facts.latent:
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
    """Two cuts of one tensor along different axes, both made; the first one may be none."""
    if one is None:
        return other
    offset = tuple(map(max, one.offset, other.offset))
    return Box(offset, tuple(map(min, one.extent, other.extent)))


def _in_blocks(scale: TensorSpec, weight: TensorSpec, box: Box, block: tuple[int, int]) -> Box:
    """Where the scales of a part of an fp8 weight are.

    Raises:
        InvalidArgument: the part ends inside a block, or the scales are not one for each block.
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
