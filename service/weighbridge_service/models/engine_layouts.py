"""Layouts of engine ranks: whole tensors, a rank's slices according to the model's own parallel plan, or explicit
boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from weighbridge._core.block_scales import DEFAULT_BLOCK, SCALE_SUFFIX
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.slices import Boxes, ExpertParallel, FullTensors, LayoutRequest, TensorParallel
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import InvalidArgument, NotFound
from weighbridge_service.models.bridges import Bridge
from weighbridge_service.models.engine_cuts import in_blocks, slices_of
from weighbridge_service.models.engine_facts import CutFacts
from weighbridge_service.models.megatron_layouts import BEHIND_THE_LAYERS

MAX_BOXES = 1_000_000
"""Maximum number of boxes in one request."""


class EngineLayouts:
    """Layouts that engines can request of a model.

    Args:
        tensors: the model's tensors, by name.
        bridge: returns the model's bridge, which contains the parallel plan, or raises if none exists. Called only for
            slices of ranks.
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
    def _facts(self) -> CutFacts:
        return CutFacts.of(self._bridge(), self._tensors, self._block)

    def layout(self, request: LayoutRequest) -> Layout:
        """Layout of the stream of slices for a request.

        If a tensor of the vocabulary is padded, the layout contains its padded shape.

        Raises:
            InvalidArgument: the request does not fit the model (the error names the tensor), or the model type has no
                parallel plan.
            NotFound: the request names a tensor that the model does not contain.
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
    """Rows that an engine's layout adds to the tensors in the files."""
    return [
        (name, Box((rows, *(0 for _ in spec.shape[1:])), (spec.shape[0] - rows, *spec.shape[1:])))
        for name, spec in target.tensors.items()
        for rows in source.tensors[name].shape[:1]
        if spec.shape[0] > rows
    ]


def _stream(slices: Sequence[tuple[TensorSpec, Box]]) -> Layout:
    return Layout.stream({spec.name: spec for spec, _ in slices}.values(), [Shard(s.name, b) for s, b in slices])


def _rank(facts: CutFacts, request: TensorParallel) -> Iterator[tuple[TensorSpec, Box]]:
    """Slices that one rank of an engine holds."""
    if request.layers is not None and request.layers[1] > facts.num_layers:
        raise InvalidArgument(
            f"layers {request.layers[0]}:{request.layers[1]} do not all exist: the model has {facts.num_layers}"
        )
    experts = request.experts
    if experts is not None and not (facts.experts or facts.stacked):
        raise InvalidArgument("the model has no experts to distribute", fix="ask without expert parallelism")
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], list[Box]]] = {}
    cut = False
    for spec in _specs_of(facts, experts):
        if request.layers is not None and not _of_stage(facts, spec.name, request.layers):
            continue
        weight = facts.tensors.get(
            spec.name.removesuffix(SCALE_SUFFIX), spec
        )  # the weight, if this tensor is its scale
        kind = facts.kinds[spec.name], spec.shape, weight.shape
        found = alike.get(kind)
        if found is None:
            shape, boxes = slices_of(facts, weight, request)
            if weight is not spec:
                shape, boxes = spec.shape, [in_blocks(spec, weight, box, facts.block) for box in boxes]
            found = alike[kind] = shape, boxes
        shape, boxes = found
        cut = cut or (boxes[0].extent != shape and weight.name not in facts.vocabulary)
        cut_spec = spec if shape == spec.shape else replace(spec, shape=shape)
        for box in boxes:
            yield cut_spec, box
    if request.size > 1 and not cut:
        raise InvalidArgument(
            f"only the vocabulary of a {facts.model_type} model would be cut for {request.size} ranks",
            fix="the family's parallel_plan() has to name its modules (docs/families.md); or pull explicit boxes",
        )


def _specs_of(facts: CutFacts, experts: ExpertParallel | None) -> Iterable[TensorSpec]:
    """Tensors that a rank holds slices of, in their order. Ignores the rank's pipeline stage."""
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


def _of_stage(facts: CutFacts, name: str, layers: tuple[int, int]) -> bool:
    """Whether a tensor is on a pipeline stage."""
    is_first, is_last = layers[0] == 0, layers[1] == facts.num_layers
    place = facts.places[name.removesuffix(SCALE_SUFFIX)]
    if place >= 0:
        return layers[0] <= place < layers[1]
    if place == BEHIND_THE_LAYERS:
        return is_last
    return is_first or (is_last and name in facts.output_too)
