"""LoRA adapters of Megatron-core models, as Megatron-Bridge adds them, with the names and shapes of peft's files.

Megatron-Bridge adds to a linear layer such as ``linear_qkv`` a module ``adapter`` with ``linear_in`` (peft's A) and
``linear_out`` (peft's B), both sharded by tensor parallelism. `CanonicalLoRA` adds one for each of the layers that are
fused there, such as ``adapter.adapter_q``. B has the same rows as the layer's weight, and A has the same columns.
Therefore the links of that weight determine the places of the elements of both. If they lead to several weights, as
those of ``linear_qkv`` do, each of these weights gets all of A, and its own rows of B.

Experts whose weights are grouped have either one adapter each, which a rank holds in one tensor, or one adapter on each
expert-parallel rank, which all experts of the rank share. In the second case ranks hold shards of different experts'
adapters, although their own names do not show it.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, Shard, TensorSpec, WeightLinks
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.megatron_state import ShardedEntry, ShardedTensors, sharded_entries, sharded_tensors
from weighbridge._trainers.peft_adapters import PREFIX, LoraModule
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

_ADAPTER = re.compile(r"^(.+)\.adapter\.(?:(adapter_\w+)\.)?(linear_in|linear_out)\.weight(_w|_v)?$")
_OF_AN_ADAPTER = re.compile(r"\.adapter\.")
_EXPERT = re.compile(r"(\.experts\.experts\.)\d+\.")
_WEIGHT = ".weight"
_FUSED: Mapping[str, str] = {
    "adapter_q": "q_proj",
    "adapter_k": "k_proj",
    "adapter_v": "v_proj",
    "adapter_gate": "gate_proj",
    "adapter_up": "up_proj",
}
"""Names that `CanonicalLoRA` gives to the adapter of one of several fused layers, with the names of these layers."""
_ROWS, _COLUMNS = -2, -1
_ONLY = "push the merged model instead: LoRAMerge of Megatron-Bridge on a copy, then push"


class AdapterPart(NamedTuple):
    """One shard of an adapter's tensor.

    Attributes:
        layer: name of the adapter's layer in the trainer's tensors.
        of: the fused layer to which the adapter belongs; empty for all.
        is_in: whether the tensor is ``linear_in``, peft's A.
        half: ``_w`` or ``_v``, if the rows are one half of a fused layer that has its own name; otherwise empty.
        shape: shape of the whole matrix.
        leading: indexes of layer and expert, if these are axes.
        box: box of the matrix.
        data: elements of the box.
        memory: address of the parameter.
    """

    layer: str
    of: str
    is_in: bool
    half: str
    shape: tuple[int, int]
    leading: tuple[int, ...]
    box: Box
    data: torch.Tensor
    memory: int


class _Slice(NamedTuple):
    """Some rows or columns of a weight, and their place in a Hugging Face weight."""

    target: str
    first: int
    target_first: int
    length: int


@dataclass(frozen=True)
class MegatronAdapters:
    """The adapters of a rank's part of a model, before their names in peft's files are known.

    Attributes:
        parts: shards of the adapters.
        beside: the whole weights of the adapters' layers, among the trainer's tensors.
        held: indexes on the leading axes of these weights that the rank holds, by name of the weight.
        scales: scale of each adapter, by the address of its ``linear_in``.
        trained: names of other parameters that are trained.
    """

    parts: tuple[AdapterPart, ...] = field(repr=False)
    beside: Mapping[str, TensorSpec] = field(repr=False)
    held: Mapping[str, frozenset[tuple[int, ...]]] = field(repr=False)
    scales: Mapping[int, LoraModule] = field(repr=False)
    trained: tuple[str, ...] = ()

    @staticmethod
    def of(model: Any) -> MegatronAdapters:
        """Find a rank's adapters.

        Args:
            model: a Megatron-core model, or the list of its virtual stages; may be wrapped.

        Returns:
            The adapters; empty for a pipeline stage without adapters.

        Raises:
            LayoutError: the model has adapters of another kind than LoRA.
        """
        chunks = _chunks(model)
        entries = [each for chunk in chunks for each in sharded_entries(chunk.sharded_state_dict())]
        keys = [str(each.key) for each in entries]
        layers = {match[1] for key in keys if (match := _ADAPTER.match(key))}
        _check_plain([key for key in keys if _OF_AN_ADAPTER.search(key)])
        trained = tuple(name for chunk in chunks for name in _trained_besides(chunk))
        if not layers:  # of this pipeline stage
            return MegatronAdapters((), {}, {}, {}, trained)
        apart = {_without_expert(layer) for layer in layers}
        wanted = [
            each
            for each, key in zip(entries, keys, strict=True)
            if _ADAPTER.match(key) or (key.endswith(_WEIGHT) and _without_expert(key[: -len(_WEIGHT)]) in apart)
        ]
        found = sharded_tensors(wanted)
        beside, held = _beside(found)
        fused = {_without_expert(str(entry.declared.key)) for entry in found.entries if len(entry.shards) > 1}
        parts = [part for entry in found.entries for part in _parts(entry, fused)]
        scales = {memory: scale for chunk in chunks for memory, scale in _scales(chunk)}
        return MegatronAdapters(tuple(parts), beside, held, scales, trained)

    def check_frozen(self) -> None:
        """Refuse a model in which other parameters than the adapters are trained, because they would not be pushed.

        Raises LayoutError.
        """
        if self.trained:
            raise LayoutError(
                counted(len(self.trained), "parameter is", "parameters are")
                + " trained besides the adapters, and would not be pushed with them",
                details=first_lines(self.trained),
                fix="freeze them, as LoRA of Megatron-Bridge does; or push the merged model",
            )

    def placed(self, links: WeightLinks) -> PlacedAdapters:
        """Return the adapters by peft's names.

        Args:
            links: links of the weights of the adapters' layers.

        Raises:
            LayoutError: a layer does not have a weight map, or is not a linear layer in Hugging Face's model.
        """
        unknown = sorted({name for name in self.beside if name not in links.sources})
        if unknown:
            raise LayoutError(
                counted(len(unknown), "layer with adapters is", "layers with adapters are") + " not in the base",
                details=first_lines(unknown),
                fix="name the base that the model was made from",
            )
        of_weight: dict[tuple[str, tuple[int, ...]], list[Link]] = defaultdict(list)
        for link in links.links:
            of_weight[link.source, link.source_box.offset[:_ROWS]].append(link)
        shards: list[tuple[Shard, torch.Tensor]] = []
        specs: dict[str, TensorSpec] = {}
        modules: dict[str, LoraModule] = {}
        for part in self.parts:
            for cut in self._slices(part, of_weight, links.targets):
                spec, shard, data = _place(part, cut, links.targets[cut.target])
                if specs.setdefault(spec.name, spec) != spec:
                    raise LayoutError(f"two adapters belong to one layer: {spec} and {specs[spec.name]}")
                shards.append((shard, data))
                if part.is_in:
                    modules[_module(cut.target)] = self._scale(part)
        layout = Layout.stream(specs.values(), [shard for shard, _ in shards])
        return PlacedAdapters(layout, tuple(data for _, data in shards), modules)

    def _scale(self, part: AdapterPart) -> LoraModule:
        found = self.scales.get(part.memory)
        if found is None:
            raise LayoutError(f"the scale of the adapter of {part.layer} is not known", fix=_ONLY)
        return found

    def _slices(
        self,
        part: AdapterPart,
        of_weight: Mapping[tuple[str, tuple[int, ...]], Sequence[Link]],
        targets: Mapping[str, TensorSpec],
    ) -> Iterator[_Slice]:
        """Yield the slices of the model's weights that contain the rows of a part of B, or the columns of a part of A,
        each once.
        """
        links = [
            link
            for name in self._weights_of(part)
            for leading in sorted(self.held[name])
            if leading[: len(part.leading)] == part.leading
            for link in of_weight[name, leading]
        ]
        axis = _COLUMNS if part.is_in else _ROWS
        found = dict.fromkeys(_slice(link, axis, targets[link.target]) for link in links)
        if part.of:
            leaf = _FUSED.get(part.of, part.of)
            own = dict.fromkeys(each.target for each in found if _module(each.target).rpartition(".")[2] == leaf)
            if not own:
                raise LayoutError(f"{part.layer} has no {leaf} in the base", fix=_ONLY)
            found = dict.fromkeys(_Slice(target, 0, 0, targets[target].shape[axis]) for target in own)
        for cut in found:
            first = max(cut.first, part.box.offset[axis])
            length = min(cut.first + cut.length, part.box.end[axis]) - first
            if length > 0:
                yield _Slice(cut.target, first, cut.target_first + first - cut.first, length)

    def _weights_of(self, part: AdapterPart) -> Iterator[str]:
        halves = ("", "_w", "_v") if part.is_in or part.of or not part.half else (part.half,)
        layers = [part.layer] if any(f"{part.layer}{_WEIGHT}{half}" in self.beside for half in halves) else []
        layers = layers or sorted(
            {
                name.rpartition(_WEIGHT)[0]
                for name in self.beside
                if _without_expert(name).startswith(part.layer + _WEIGHT)
            }
        )
        return (name for layer in layers for half in halves if (name := f"{layer}{_WEIGHT}{half}") in self.beside)


@dataclass(frozen=True)
class PlacedAdapters:
    """The adapters of a rank by peft's names.

    Attributes:
        layout: shards of the adapters, as one stream.
        tensors: one tensor for each shard, which aliases the model. If layers are fused, the shards of A of several
            layers have the same tensor.
        modules: scale of the adapter of each layer, by the layer's name in Hugging Face's model.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    modules: Mapping[str, LoraModule] = field(repr=False)


def is_megatron(model: Any) -> bool:
    """Whether this is a Megatron-core model, or the list of its virtual stages."""
    chunks = _chunks(model)
    return bool(chunks) and all(callable(getattr(each, "sharded_state_dict", None)) for each in chunks)


def _chunks(model: Any) -> list[Any]:
    """Return the virtual stages of a model, without wrappers."""
    chunks = []
    for chunk in model if isinstance(model, list | tuple) else [model]:
        while (inner := getattr(chunk, "module", None)) is not None:
            chunk = inner
        chunks.append(chunk)
    return chunks


def _check_plain(keys: Iterable[str]) -> None:
    """Refuse tensors that are not LoRA matrices. Raises LayoutError."""
    other = [
        key
        for key in keys
        if not _ADAPTER.match(key) and "._extra_state" not in key and not key.endswith("_extra_state")
    ]
    if other:
        raise LayoutError(
            counted(len(other), "tensor of adapters is", "tensors of adapters are") + " not part of plain LoRA",
            details=first_lines(other),
            fix=_ONLY,
        )


def _trained_besides(chunk: Any) -> Iterator[str]:
    """Yield the names of the trained parameters that do not belong to adapters."""
    for name, parameter in chunk.named_parameters():
        if parameter.requires_grad and not _OF_AN_ADAPTER.search(f".{name}"):
            yield name


def _scales(chunk: Any) -> Iterator[tuple[int, LoraModule]]:
    """Yield rank, alpha and dropout of each adapter, with the address of its ``linear_in``. Raises LayoutError for an
    adapter with an activation between its matrices.
    """
    import torch

    for name, module in chunk.named_modules():
        first, rank, alpha = (getattr(module, each, None) for each in ("linear_in", "dim", "alpha"))
        if first is None or rank is None or alpha is None:
            continue
        if not isinstance(getattr(module, "activation", None), torch.nn.Identity | None):
            raise LayoutError(
                f"{name} has an activation between its two matrices, which plain LoRA does not have",
                fix=_ONLY,
            )
        dropout = getattr(getattr(module, "dropout", None), "p", 0.0)
        yield first.weight.data_ptr(), LoraModule(int(rank), float(alpha), float(dropout))


def _beside(
    found: ShardedTensors,
) -> tuple[dict[str, TensorSpec], dict[str, frozenset[tuple[int, ...]]]]:
    """Return the weights among these tensors, and for each the leading indexes at which the rank holds shards."""
    held: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for placement in found.layout.placements:
        if not _ADAPTER.match(placement.shard.tensor):
            offset, extent = placement.shard.box
            leading = zip(offset[:_ROWS], extent[:_ROWS], strict=True)
            held[placement.shard.tensor].update(itertools.product(*(range(o, o + e) for o, e in leading)))
    return (
        {name: found.layout.tensors[name] for name in held},
        {name: frozenset(leading) for name, leading in held.items()},
    )


def _without_expert(name: str) -> str:
    return _EXPERT.sub(r"\1", name)


def _parts(entry: ShardedEntry, fused: Collection[str]) -> Iterator[AdapterPart]:
    """Yield the parts of one parameter, if it belongs to an adapter.

    Megatron-Bridge declares the rows of B of every ``linear_fc1`` as alternating rows of gate and up, even if they
    belong to only one of these, or if the layer is not fused. In these cases the rows are contiguous, and the declared
    places are wrong.
    """
    for shard in entry.shards:
        found = _ADAPTER.match(shard.key)
        if found is None:
            return
        layer, of, side, half = found[1], found[2] or "", found[3], found[4] or ""
        offset, local = tuple(map(int, shard.global_offset)), tuple(map(int, shard.local_shape))
        rows, columns = map(int, shard.global_shape[_ROWS:])
        part = AdapterPart(
            layer, of, side == "linear_in", half, (rows, columns), offset[:_ROWS],
            Box(offset[_ROWS:], local[_ROWS:]), shard.data.detach(), entry.declared.data.data_ptr(),
        )  # fmt: skip
        if _is_cut_in_halves(entry) and (of or _without_expert(f"{layer}{_WEIGHT}") not in fused):
            data = entry.declared.data.detach()
            box = Box((2 * offset[_ROWS], offset[_COLUMNS]), tuple(data.shape))
            shape = (rows * 2 if half else rows, columns)
            yield part._replace(half="", shape=shape, box=box, data=data)
            return
        inside = len(part.leading) - len(local[:_ROWS])
        for index in itertools.product(*map(range, local[:_ROWS])):  # if a tensor contains several experts
            own = tuple(each + at for each, at in zip(part.leading[inside:], index, strict=True))
            yield part._replace(leading=(*part.leading[:inside], *own), data=part.data[index])


def _is_cut_in_halves(entry: ShardedEntry) -> bool:
    """Whether a matrix is declared as two matrices, gate and up."""
    matrices = {tuple(shard.global_offset)[:_ROWS] for shard in entry.shards}
    return len(entry.shards) == 2 and len(matrices) == 1 and entry.declared.data.dim() == 2


def _slice(link: Link, axis: int, target: TensorSpec) -> _Slice:
    """Return the rows or columns of a link. Raises LayoutError if the link does not lead to a linear layer."""
    own = len(link.source_box.offset)
    if len(target.shape) != 2 or link.axes != (own - 2, own - 1) or not target.name.endswith(_WEIGHT):
        raise LayoutError(
            (
                f"{target} is not the weight of a linear layer with as many rows and columns as "
                f"{link.source} has, so peft has no adapter for it"
            ),
            fix=_ONLY,
        )
    return _Slice(link.target, link.source_box.offset[axis], link.target_box.offset[axis], link.source_box.extent[axis])


def _place(part: AdapterPart, cut: _Slice, target: TensorSpec) -> tuple[TensorSpec, Shard, torch.Tensor]:
    """Return a slice of a part as a shard of one of peft's tensors."""
    rows, columns = target.shape
    dtype = dtypes.from_torch(part.data.dtype)
    if part.is_in:
        name, shape = f"{PREFIX}{_module(target.name)}.lora_A.weight", (part.shape[0], columns)
        box = Box((part.box.offset[0], cut.target_first), (part.box.extent[0], cut.length))
    else:
        name, shape = f"{PREFIX}{_module(target.name)}.lora_B.weight", (rows, part.shape[1])
        box = Box((cut.target_first, part.box.offset[1]), (cut.length, part.box.extent[1]))
    axis = 1 if part.is_in else 0
    data = part.data.narrow(axis, cut.first - part.box.offset[axis], cut.length)
    return TensorSpec(name, dtype, shape), Shard(name, box), data


def _module(weight: str) -> str:
    return weight.removesuffix(_WEIGHT)
