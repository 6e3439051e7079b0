"""Forms of a model's tensors in memory that differ from those in its files.

Trainers hold the experts of a layer stacked in one tensor, with the gate's rows before those of the up projection;
files have a tensor for each expert and projection. A form maps each box of the tensor in memory to a box of a file's
tensor, so that shards are views and are pushed and filled without a copy. Source of the conventions:
``conversion_mapping`` of transformers 5.23.

- ``experts.gate_up_proj`` ``[experts, 2 * width, hidden]``: of each expert ``gate_proj`` and ``up_proj``, or ``w1`` and
  ``w3``.
- ``experts.down_proj`` ``[experts, hidden, width]``: of each expert ``down_proj``, or ``w2``; without gates,
  ``experts.up_proj`` is formed in the same way.
- Both may have their last two axes swapped, and so may tensors that the files themselves have stacked. If the two
  lengths are equal, the axes are not swapped, as in transformers.
- ``gate_up_proj.weight`` ``[2 * width, hidden]``: ``gate_proj.weight`` and ``up_proj.weight``.
- Names of Mixtral, PhiMoE, Granite, Nemotron-H, ERNIE and EXAONE (`_PATHS`, `_ENDINGS`).
- Names of vision-language models, whose files have ``language_model.model.`` or ``visual.`` at the top, where in memory
  both are below ``model.`` (`_paths_of`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(?P<stem>.*\bexperts)\.(?P<number>\d+)\.(?P<projection>\w+)\.weight")
_STACKED = re.compile(r".*\bexperts\.(gate_up_proj|up_proj|down_proj)")
_PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_GATE, _UP = ".gate_proj.weight", ".up_proj.weight"
_PATHS = ((re.compile(r"\.block_sparse_moe\."), ".mlp."), (re.compile(r"^backbone\."), "model."))
_LANGUAGE = re.compile(r"^(language_model|text_model)\.model\.")
_APART = (
    (_LANGUAGE, r"model.\1."),
    (re.compile(r"^(?:language_model|text_model)\.lm_head\."), "lm_head."),
    (re.compile(r"^(?!(?:language_model|text_model|model|lm_head)\.)"), "model."),
)
"""Rules for models whose files store the language model separately, such as LLaVA."""
_VISUAL = re.compile(r"^visual\.")
_BESIDE = (
    (_VISUAL, "model.visual."),
    (re.compile(r"^model\.(?!(?:language_model|visual)\.)"), "model.language_model."),
)
"""Rules for models whose files have the vision tower at the same level as the language model, such as Qwen2-VL."""
_Rules = tuple[tuple[re.Pattern[str], str], ...]
_ENDINGS = (
    (re.compile(r"\.block_sparse_moe\.gate\.weight$"), ".mlp.router.weight"),
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".block_sparse_moe.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".block_sparse_moe.experts.down_proj"),
    (re.compile(r"\.block_sparse_moe\.router\.layer\.weight$"), ".block_sparse_moe.router.weight"),
    (re.compile(r"\.mlp\.e_score_correction_bias$"), ".mlp.gate.e_score_correction_bias"),
    (
        re.compile(r"\.mlp\.moe_statics\.e_score_correction_bias$"),
        ".mlp.gate.moe_statics.e_score_correction_bias",
    ),
)
"""Suffixes of names in files, and the corresponding suffixes in memory in transformers 5."""


class Member(NamedTuple):
    """A tensor of the files as a part of a tensor in memory.

    Attributes:
        spec: the tensor.
        place: its box in the tensor in memory; with one additional axis if experts are stacked.
    """

    spec: TensorSpec
    place: Box


class FormPart(NamedTuple):
    """A box of a tensor in memory that corresponds to a box of a tensor in the files.

    Attributes:
        tensor: name of the tensor in the files.
        box: the part of that tensor.
        where: the part of the box in memory; empty for all of it.
        stacked: whether the box in memory has an axis of experts before the file's axes.
        swapped: whether its last two axes are in reverse order compared with the file.
    """

    tensor: str
    box: Box
    where: tuple[slice, ...]
    stacked: bool
    swapped: bool

    def view(self, held: torch.Tensor) -> torch.Tensor:
        """The part of a box in memory, of the extent of its box in the files; an alias."""
        found = held[self.where] if self.where else held
        if self.stacked:
            found = found[0]
        return found.mT if self.swapped else found


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor in memory.

    Attributes:
        name: the tensor's.
        shape: its shape.
        members: the file tensors that it consists of.
    """

    name: str
    shape: tuple[int, ...]
    members: tuple[Member, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.members[0].spec.dtype}{list(self.shape)}"

    @property
    def tensors(self) -> Sequence[str]:
        """Names of the files' tensors that it consists of."""
        return [member.spec.name for member in self.members]

    @staticmethod
    def plain(spec: TensorSpec) -> Form:
        """A tensor that has the same form in memory and in the files."""
        return Form(spec.name, spec.shape, (Member(spec, Box.whole(spec.shape)),))

    def is_swapped(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has the form with its last two axes swapped."""
        if tuple(shape) == self.shape or len(self.shape) != 3 or not _STACKED.fullmatch(self.name):
            return False
        return tuple(shape) == (self.shape[0], self.shape[2], self.shape[1])

    def parts(self, box: Box, *, swapped: bool = False) -> list[FormPart]:
        """The parts of a box of the tensor in memory.

        Args:
            box: the box, in the coordinates of the tensor in memory.
            swapped: whether its last two axes are swapped there.
        """
        spec, place = self.members[0]
        if len(self.members) == 1 and place.extent == spec.shape and not swapped:  # nearly all tensors
            return [FormPart(spec.name, box, (), stacked=False, swapped=False)]
        upright = _swap(box) if swapped else box
        found = []
        for spec, place in self.members:
            common = upright.intersect(place)
            if common is None or not common.volume:
                continue
            stacked = len(place.extent) > len(spec.shape)
            there = common.relative_to(place.offset)
            if stacked:
                there = Box(there.offset[1:], there.extent[1:])
            here = common.relative_to(upright.offset)
            where = (_swap(here) if swapped else here).offset, (_swap(here) if swapped else here).extent
            slices = tuple(slice(start, start + length) for start, length in zip(*where, strict=True))
            found.append(FormPart(spec.name, there, slices, stacked, swapped))
        return found


def _swap(box: Box) -> Box:
    (*offset, o, p), (*extent, e, f) = box
    return Box((*offset, p, o), (*extent, f, e))


class MemoryShards(NamedTuple):
    """Shards that an ordinary tensor in memory consists of.

    Attributes:
        name: name of its form.
        tensors: names of the files' tensors that it consists of.
        parts: the shards that it consists of, with the position of each.
    """

    name: str
    tensors: Sequence[str]
    parts: tuple[tuple[Shard, FormPart], ...]


class TensorForms(dict[str, TensorSpec]):
    """A model's tensors by name, in the form of its files.

    It caches values that do not change between pushes: the readings of tensors by name, shape and dtype, and the stream
    of the last push.
    """

    _last_stream: tuple[Sequence[Shard], Layout] | None = None

    @staticmethod
    def of(tensors: Mapping[str, TensorSpec]) -> TensorForms:
        """These tensors as `TensorForms`.

        Returns the same object if they already are, so that its other forms are computed only once.
        """
        return tensors if isinstance(tensors, TensorForms) else TensorForms(tensors)

    def form(self, name: str) -> Form | None:
        """The form of the tensor with this name in memory; None if the model has none."""
        return self._plain_forms.get(name) or self.other_forms.get(name)

    @cached_property
    def readings(self) -> dict[Hashable, MemoryShards]:
        """Readings of ordinary tensors, by the properties that decide them."""
        return {}

    def stream(self, shards: Sequence[Shard]) -> Layout:
        """The stream of these shards.

        For the same shards as last time, returns the same object, which has its digest cached.
        """
        last = self._last_stream
        if last is None or last[0] != shards:
            names = dict.fromkeys(shard.tensor for shard in shards)
            last = self._last_stream = shards, Layout.stream([self[name] for name in names], shards)
        return last[1]

    @cached_property
    def _plain_forms(self) -> Mapping[str, Form]:
        return {name: Form.plain(spec) for name, spec in self.items()}

    @cached_property
    def other_forms(self) -> Mapping[str, Form]:
        """The alternative forms of its tensors in memory, by name."""
        paths = _paths_of(self)
        made = [*_of_experts(self.values(), paths), *_merged(self), *_renamed(self.values(), paths)]
        return {form.name: form for form in made if form.name not in self}


def _paths_of(names: Iterable[str]) -> _Rules:
    """Rules from the names in a model's files to those in memory."""
    for name in names:
        if _LANGUAGE.match(name):
            return (*_PATHS, *_APART)
        if _VISUAL.match(name):
            return (*_PATHS, *_BESIDE)
    return _PATHS


def _of_experts(specs: Iterable[TensorSpec], paths: _Rules) -> Iterable[Form]:
    experts: defaultdict[str, defaultdict[str, dict[int, TensorSpec]]] = defaultdict(lambda: defaultdict(dict))
    for spec in specs:
        match = _EXPERT.fullmatch(spec.name)
        kind = _PROJECTIONS.get(match["projection"]) if match else None
        if match and kind is not None:
            experts[match["stem"]][kind][int(match["number"])] = spec
    for stem, kinds in experts.items():
        gated = "gate" in kinds
        stacks = {"gate_up_proj": ("gate", "up")} if gated else {"up_proj": ("up",)}
        for name, of in {**stacks, "down_proj": ("down",)}.items():
            columns = [kinds[kind] for kind in of]
            if not columns[0] or any(sorted(column) != list(range(len(columns[0]))) for column in columns):
                continue
            shapes = {spec.shape for column in columns for spec in column.values()}
            if len(shapes) > 1 or len(min(shapes)) != 2:
                continue
            for path in (stem, *_renamed_with(paths, stem)):
                yield _stacked(f"{path}.{name}", columns)


def _stacked(name: str, columns: Sequence[Mapping[int, TensorSpec]]) -> Form:
    rows, width = columns[0][0].shape
    members = [
        Member(column[expert], Box((expert, index * rows, 0), (1, rows, width)))
        for expert in range(len(columns[0]))
        for index, column in enumerate(columns)
    ]
    return Form(name, (len(columns[0]), rows * len(columns), width), tuple(members))


def _merged(model: Mapping[str, TensorSpec]) -> Iterable[Form]:
    for name, gate in model.items():
        up = model.get(name.removesuffix(_GATE) + _UP) if name.endswith(_GATE) and not _EXPERT.fullmatch(name) else None
        if up is not None and up.shape == gate.shape and len(gate.shape) == 2:
            rows, width = gate.shape
            members = Member(gate, Box((0, 0), gate.shape)), Member(up, Box((rows, 0), up.shape))
            yield Form(name.removesuffix(_GATE) + ".gate_up_proj.weight", (2 * rows, width), members)


def _renamed(specs: Iterable[TensorSpec], paths: _Rules) -> Iterable[Form]:
    for spec in specs:
        for name in _renamed_with((*paths, *_ENDINGS), spec.name):
            yield Form(name, spec.shape, Form.plain(spec).members)


def _renamed_with(rules: Iterable[tuple[re.Pattern[str], str]], name: str) -> list[str]:
    return [there.sub(here, name) for there, here in rules if there.search(name)]
