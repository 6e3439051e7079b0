"""LoRA adapters of Megatron-core models, as Megatron-Bridge adds them, by the names and in the shapes that peft's files have.

Megatron-Bridge puts beside a linear layer, ``linear_qkv``, a module ``adapter`` with ``linear_in`` (peft's A) and ``linear_out`` (peft's B), both cut by tensor
parallelism; in `CanonicalLoRA` one for each of the layers that are fused there, ``adapter.adapter_q``. The rows of B are those of the weight beside it, and the
columns of A are its columns. So the links of that weight say where the elements of both belong: where they lead to several weights, as those of
``linear_qkv`` do, each of these has all of A, and its own rows of B.

Experts whose weights are grouped have an adapter each, which a rank has in one tensor; or one on each expert-parallel rank, which is that of each expert of the rank.
Ranks hold shards of different experts' adapters then, whatever their own names say.
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
from weighbridge._formats.megatron_state import Entry, ShardedTensors, sharded_entries, sharded_tensors
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
"""Names that `CanonicalLoRA` gives to adapters of one layer of several that are fused, with those of the layers."""
_ROWS, _COLUMNS = -2, -1
_ONLY = "push the merged model instead: LoRAMerge of Megatron-Bridge on a copy, then push"


class Part(NamedTuple):
    """One shard of an adapter's tensor.

    Attributes:
        layer: name of the layer that it is beside, as a trainer's tensors have it.
        of: which of the fused layers it is of; empty for all.
        is_in: whether it is of ``linear_in``, peft's A.
        half: ``_w`` or ``_v``, if the rows are one half of a fused layer that is named apart; otherwise empty.
        shape: of the whole matrix.
        leading: indexes of layer and expert, where these are axes.
        box: part of the matrix.
        data: its elements.
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
    """Some of the rows or columns of a weight, and where they are in a weight of Hugging Face's."""

    target: str
    first: int
    target_first: int
    length: int


@dataclass(frozen=True)
class MegatronAdapters:
    """The adapters of a rank's part of a model, before it is known what their names are.

    Attributes:
        parts: their shards.
        beside: the weights beside them, as the trainer's tensors, whole.
        held: indexes on the leading axes of these weights that the rank holds, by their names.
        scales: how each adapter is scaled, by the address of its ``linear_in``.
        trained: names of parameters that are trained besides.
    """

    parts: tuple[Part, ...] = field(repr=False)
    beside: Mapping[str, TensorSpec] = field(repr=False)
    held: Mapping[str, frozenset[tuple[int, ...]]] = field(repr=False)
    scales: Mapping[int, LoraModule] = field(repr=False)
    trained: tuple[str, ...] = ()

    @staticmethod
    def of(model: Any) -> MegatronAdapters:
        """Find a rank's adapters.

        Args:
            model: a model of Megatron-core, or the list of its virtual stages; in what wrappers have made of them.

        Returns:
            None of a pipeline stage that has none.

        Raises:
            LayoutError: there are adapters of another kind than LoRA.
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
            if _ADAPTER.match(key)
            or (key.endswith(_WEIGHT) and _without_expert(key[: -len(_WEIGHT)]) in apart)
        ]
        found = sharded_tensors(wanted)
        beside, held = _beside(found)
        fused = {_without_expert(str(entry.declared.key)) for entry in found.entries if len(entry.shards) > 1}
        parts = [part for entry in found.entries for part in _parts(entry, fused)]
        scales = {memory: scale for chunk in chunks for memory, scale in _scales(chunk)}
        return MegatronAdapters(tuple(parts), beside, held, scales, trained)

    def check_frozen(self) -> None:
        """Refuse a model of which more is trained than its adapters: they would be pushed without it. Raises LayoutError."""
        if self.trained:
            raise LayoutError(
                counted(len(self.trained), "parameter is", "parameters are")
                + " trained besides the adapters, and would not be pushed with them",
                details=first_lines(self.trained),
                fix="freeze them, as LoRA of Megatron-Bridge does; or push the merged model",
            )

    def placed(self, links: WeightLinks) -> PlacedAdapters:
        """The adapters by peft's names.

        Args:
            links: of the weights beside them.

        Raises:
            LayoutError: a layer has no weight map, or is no linear layer in Hugging Face's model.
        """
        unknown = sorted({name for name in self.beside if name not in links.sources})
        if unknown:
            raise LayoutError(
                counted(len(unknown), "layer with adapters is", "layers with adapters are")
                + " not one of the base",
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
                    raise LayoutError(f"two adapters are of one layer: {spec} and {specs[spec.name]}")
                shards.append((shard, data))
                if part.is_in:
                    modules[_module(cut.target)] = self._scale(part)
        layout = Layout.stream(specs.values(), [shard for shard, _ in shards])
        return PlacedAdapters(layout, tuple(data for _, data in shards), modules)

    def _scale(self, part: Part) -> LoraModule:
        found = self.scales.get(part.memory)
        if found is None:
            raise LayoutError(f"nothing says how the adapter of {part.layer} is scaled", fix=_ONLY)
        return found

    def _slices(
        self,
        part: Part,
        of_weight: Mapping[tuple[str, tuple[int, ...]], Sequence[Link]],
        targets: Mapping[str, TensorSpec],
    ) -> Iterator[_Slice]:
        """Yield the slices of the model's weights that hold the rows of a part of B, or the columns of a part of A; each slice once."""
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
            own = dict.fromkeys(
                each.target for each in found if _module(each.target).rpartition(".")[2] == leaf
            )
            if not own:
                raise LayoutError(f"{part.layer} is made of no {leaf} in the base", fix=_ONLY)
            found = dict.fromkeys(_Slice(target, 0, 0, targets[target].shape[axis]) for target in own)
        for cut in found:
            first = max(cut.first, part.box.offset[axis])
            length = min(cut.first + cut.length, part.box.end[axis]) - first
            if length > 0:
                yield _Slice(cut.target, first, cut.target_first + first - cut.first, length)

    def _weights_of(self, part: Part) -> Iterator[str]:
        halves = ("", "_w", "_v") if part.is_in or part.of or not part.half else (part.half,)
        layers = [part.layer] if any(f"{part.layer}{_WEIGHT}{half}" in self.beside for half in halves) else []
        layers = layers or sorted(
            {
                name.rpartition(_WEIGHT)[0]
                for name in self.beside
                if _without_expert(name).startswith(part.layer + _WEIGHT)
            }
        )
        return (
            name for layer in layers for half in halves if (name := f"{layer}{_WEIGHT}{half}") in self.beside
        )


@dataclass(frozen=True)
class PlacedAdapters:
    """The adapters of a rank by peft's names.

    Attributes:
        layout: their shards, as one stream.
        tensors: one for each of them; they alias the model. Where layers are fused, those of A of several layers are one tensor.
        modules: how the adapter of each layer is scaled, by the layer's name in Hugging Face's model.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    modules: Mapping[str, LoraModule] = field(repr=False)


def is_megatron(model: Any) -> bool:
    """Whether this is a model of Megatron-core, or the list of its virtual stages."""
    chunks = _chunks(model)
    return bool(chunks) and all(callable(getattr(each, "sharded_state_dict", None)) for each in chunks)


def _chunks(model: Any) -> list[Any]:
    """The virtual stages of a model, without wrappers."""
    chunks = []
    for chunk in model if isinstance(model, list | tuple) else [model]:
        while (inner := getattr(chunk, "module", None)) is not None:
            chunk = inner
        chunks.append(chunk)
    return chunks


def _check_plain(keys: Iterable[str]) -> None:
    """Refuse what is no matrix of LoRA. Raises LayoutError."""
    other = [
        key
        for key in keys
        if not _ADAPTER.match(key) and "._extra_state" not in key and not key.endswith("_extra_state")
    ]
    if other:
        raise LayoutError(
            counted(len(other), "tensor of adapters is", "tensors of adapters are") + " none of plain LoRA",
            details=first_lines(other),
            fix=_ONLY,
        )


def _trained_besides(chunk: Any) -> Iterator[str]:
    """Names of the trained parameters that do not belong to adapters."""
    for name, parameter in chunk.named_parameters():
        if parameter.requires_grad and not _OF_AN_ADAPTER.search(f".{name}"):
            yield name


def _scales(chunk: Any) -> Iterator[tuple[int, LoraModule]]:
    """Rank, alpha and dropout of each adapter, with the address of its ``linear_in``. Raises LayoutError for an adapter with an activation
    between its matrices."""
    import torch

    for name, module in chunk.named_modules():
        first, rank, alpha = (getattr(module, each, None) for each in ("linear_in", "dim", "alpha"))
        if first is None or rank is None or alpha is None:
            continue
        if not isinstance(getattr(module, "activation", None), torch.nn.Identity | None):
            raise LayoutError(f"{name} has an activation between its two matrices, as no LoRA has", fix=_ONLY)
        dropout = getattr(getattr(module, "dropout", None), "p", 0.0)
        yield first.weight.data_ptr(), LoraModule(int(rank), float(alpha), float(dropout))


def _beside(
    found: ShardedTensors,
) -> tuple[dict[str, TensorSpec], dict[str, frozenset[tuple[int, ...]]]]:
    """The weights among these tensors, and the leading indexes of each of which the rank holds shards."""
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


def _parts(entry: Entry, fused: Collection[str]) -> Iterator[Part]:
    """The parts of one parameter, if it is an adapter's.

    Megatron-Bridge declares the rows of B beside every ``linear_fc1`` as those of gate and up in turns, also where they are of only one of these, or where the layer
    is not fused: then they are contiguous, and declared elsewhere.
    """
    for shard in entry.shards:
        found = _ADAPTER.match(shard.key)
        if found is None:
            return
        layer, of, side, half = found[1], found[2] or "", found[3], found[4] or ""
        offset, local = tuple(map(int, shard.global_offset)), tuple(map(int, shard.local_shape))
        rows, columns = map(int, shard.global_shape[_ROWS:])
        part = Part(
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
        for index in itertools.product(
            *map(range, local[:_ROWS])
        ):  # of experts, where one tensor has several
            own = tuple(each + at for each, at in zip(part.leading[inside:], index, strict=True))
            yield part._replace(leading=(*part.leading[:inside], *own), data=part.data[index])


def _is_cut_in_halves(entry: Entry) -> bool:
    """Whether a matrix is declared as two, of gate and up."""
    matrices = {tuple(shard.global_offset)[:_ROWS] for shard in entry.shards}
    return len(entry.shards) == 2 and len(matrices) == 1 and entry.declared.data.dim() == 2


def _slice(link: Link, axis: int, target: TensorSpec) -> _Slice:
    """The rows or columns of a link. Raises LayoutError if it leads to what is no linear layer."""
    own = len(link.source_box.offset)
    if len(target.shape) != 2 or link.axes != (own - 2, own - 1) or not target.name.endswith(_WEIGHT):
        raise LayoutError(
            f"{target} is no weight of a linear layer with as many rows and columns as {link.source} has, so peft has no adapter of it",
            fix=_ONLY,
        )
    return _Slice(
        link.target, link.source_box.offset[axis], link.target_box.offset[axis], link.source_box.extent[axis]
    )


def _place(part: Part, cut: _Slice, target: TensorSpec) -> tuple[TensorSpec, Shard, torch.Tensor]:
    """A slice of a part as a shard of one of peft's tensors."""
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
