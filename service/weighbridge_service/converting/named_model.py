"""Model in a torch checkpoint whose parameters have Hugging Face's names, such as an FSDP checkpoint in DCP format or
with a file for each rank.

A checkpoint may contain more than the model. The model's tensors are found by name: by their names in its files, or by
the names of other forms in memory, such as all experts in one tensor. If the model has no weight map, all tensors under
``model``, ``state_dict`` or ``module`` are used, or else all tensors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from weighbridge._core.boxes import Box, Link
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import readable
from weighbridge._formats.folder_weights import same, tied_copies
from weighbridge._formats.memory_forms import Form, FormPart, TensorForms
from weighbridge._formats.misfits import told
from weighbridge._formats.naming.parameter_names import check_merged, unwrapped_names
from weighbridge._formats.safetensors_files import map_file
from weighbridge._formats.torch_state import NAMED, model_form, unknown_names
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint, read_torch_dist
from weighbridge._trainers.torch_dist.metadata import CONFIG_FILE
from weighbridge._trainers.torch_dist.rank_files import has_rank_files, read_rank_files
from weighbridge.errors import DataLoss, LayoutError, NotFound
from weighbridge_service.converting.checkpoint_model import is_megatron
from weighbridge_service.families import has_weight_map
from weighbridge_service.models.bridges import bridge_for, parse_config

_STATES = re.compile(r"^(optim\w*|\w*scheduler|train_state|dataloader|loader|rng\w*|rank_state|scaler|ema)(?=\.|/|$)")
_TOPS = ("model", "state_dict", "module")
"""Keys under which trainers save a module next to other state: torch's examples, Lightning, DeepSpeed."""
_MOST_PREFIX = 3
"""Maximum number of components, each followed by a dot, in a prefix of all of the model's names."""
_OTHER_NAMES = (
    "parameters must have Hugging Face's names; checkpoints of torchtitan's own models are converted by its own "
    "scripts/checkpoint_conversion/convert_to_hf.py"
)


class Twin(NamedTuple):
    """A tensor of a source, or a chunk of a tensor, that is omitted because it must equal another."""

    name: str
    copy: Placement
    original: Placement


def check_twins(folder: Path, twins: Sequence[Twin]) -> None:
    """Read and compare all twins.

    Raises:
        DataLoss: a copy differs from its original.
    """
    places = (place for twin in twins for place in (twin.copy, twin.original))
    files = {name: map_file(folder, name) for name in dict.fromkeys(place.buffer for place in places)}
    for twin in twins:
        if not same(files, twin.copy, twin.original):
            raise DataLoss(
                (
                    f"{twin.name} is not the same as {twin.original.shard.tensor}, of which it is "
                    "a copy, so that it cannot be left out"
                ),
                fix=(
                    "leave one of them out, or, if it is config.json that ties them, set "
                    "tie_word_embeddings to false there"
                ),
            )


@dataclass(frozen=True)
class NamedModel:
    """A model, and its place in a checkpoint.

    Attributes:
        tensors: tensors of the model's files, in the dtypes of the checkpoint.
        layout: weights of the checkpoint, by their names in the checkpoint.
        forms: form of each of these weights in the model, by the same names.
        tied: copies of other weights, chunk by chunk. They are omitted.
        left_out: number of entries that are not weights, by kind.
    """

    tensors: Mapping[str, TensorSpec]
    layout: Layout = field(repr=False)
    forms: Mapping[str, Form] = field(repr=False)
    tied: tuple[Twin, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def links(self) -> Iterator[Link]:
        """Links from the checkpoint's tensors to the model's."""
        for name, spec in self.layout.tensors.items():
            whole = Box.whole(spec.shape)
            for part in self._parts(name, whole):
                axes = [axis + part.stacked for axis in range(len(part.box.extent))]
                if part.swapped:
                    axes[-2:] = axes[:-3:-1]
                yield Link(name, _box(part, whole), part.tensor, part.box, tuple(axes))

    def shards(self) -> Iterator[tuple[Shard, Placement]]:
        """The chunks as shards of the model, each with the place of its bytes.

        Raises:
            LayoutError: the bytes of a shard are not contiguous, or are in another order. The error names the tensors.
        """
        apart = []
        for place in self.layout.placements:
            name, box = place.shard.tensor, place.shard.box
            size = self.layout.tensors[name].dtype.itemsize
            for part in self._parts(name, box):
                here = _box(part, Box.whole(box.extent))
                first = _first_of_run(here, box.extent)
                if part.swapped or first is None:
                    apart.append(name)
                    continue
                nbytes = here.volume * size
                shard = Shard(part.tensor, part.box)
                yield shard, place._replace(shard=shard, offset=place.offset + first * size, nbytes=nbytes)
        if apart:
            names = list(dict.fromkeys(apart))
            raise LayoutError(
                (
                    f"{counted(len(names), 'tensor has', 'tensors have')} a different order of "
                    "elements in the checkpoint than in the model's files"
                ),
                details=names[:NAMED],
                fix="convert the checkpoint first (weighbridge convert CHECKPOINT HF_DIR), and import the folder",
            )

    def _parts(self, name: str, box: Box) -> list[FormPart]:
        form = self.forms[name]
        return form.parts(box, swapped=form.is_swapped(self.layout.tensors[name].shape))


def read_checkpoint(folder: Path) -> tuple[TorchDistCheckpoint, bool]:
    """Read a checkpoint's metadata.

    Also returns whether its weights have Hugging Face's names instead of Megatron-core's.

    Raises:
        As `read_torch_dist` and `read_rank_files` do.
    """
    if has_rank_files(folder):
        return read_rank_files(folder), True
    found = read_torch_dist(folder)
    return found, not ((folder / CONFIG_FILE).exists() or is_megatron(found))


def named_model(config_json: bytes, checkpoint: TorchDistCheckpoint) -> NamedModel:
    """Find a model's tensors in a checkpoint.

    Args:
        config_json: config of the model.
        checkpoint: the checkpoint.

    Raises:
        InvalidArgument: the config cannot be parsed.
        NotFound: the checkpoint does not contain any tensor of the model.
        LayoutError: tensors are missing or unknown, have another shape, or are LoRA adapters that are not merged. The
            error names each.
    """
    there = checkpoint.layout.tensors
    config = parse_config(config_json)
    if has_weight_map(config):
        bridge = bridge_for(config_json)
        usual = max(there.values(), key=lambda spec: spec.nbytes).dtype if there else None
        known = TensorForms(
            {name: TensorSpec(name, usual, shape) for name, shape in bridge.hugging_face.items() if usual}
        )
        prefix = _prefix_by_names(there, known)
        parts: Mapping[str, Sequence[str]] = {part: list(names) for part, names in bridge.parts.items()}
    else:
        prefix = _prefix_by_paths(checkpoint)
        names = _unwrapped(_names_under(prefix, checkpoint))
        known = TensorForms({own: TensorSpec(own, there[name].dtype, there[name].shape) for name, own in names.items()})
        parts = {}
    own = _unwrapped(_names_under(prefix, checkpoint))
    if not own:
        raise NotFound(
            "the checkpoint has no weights of a model",
            details=sorted(there)[:NAMED],
            fix=(
                'save the module\'s state under "model": dcp.save({"model": module.state_dict()}, checkpoint_id=FOLDER)'
            ),
        )
    check_merged(own.values(), "merge them into the model before it is saved: model.merge_and_unload()")
    tied = tied_copies(config_json, {name: _named(there[full], name) for full, name in own.items()})
    weights = {full: name for full, name in own.items() if name not in tied and not name.endswith("inv_freq")}
    forms = {full: form for full, name in weights.items() if (form := model_form(name, known)) is not None}
    tensors = _checked(known, weights, forms, there, parts, prefix)
    kept = checkpoint.layout.renamed({full: full for full in forms})
    full_names = {name: full for full, name in own.items()}
    copies = {full_names[copy]: full_names[original] for copy, original in tied.items()}
    return NamedModel(
        tensors,
        kept,
        forms,
        tuple(_compared(checkpoint.layout, copies)),
        _left_out(checkpoint, forms, copies),
    )


def _prefix_by_names(there: Mapping[str, TensorSpec], known: TensorForms) -> str:
    """Prefix of the model's names in the checkpoint: the prefix with which most names are known.

    Raises NotFound if no name is known.
    """
    counts: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        for cut in range(min(_MOST_PREFIX + 1, len(parts))):
            if model_form(".".join(parts[cut:]), known) is not None:
                counts["".join(f"{part}." for part in parts[:cut])] += 1
    if not counts:
        raise NotFound(
            f"none of the {counted(len(there), 'tensor')} in the checkpoint has the name of one of the model",
            details=[*list(there)[:3], *(f"the model has {name}" for name in list(known)[:3])],
            fix=f"give the config.json that belongs to the checkpoint (--config); {_OTHER_NAMES}",
        )
    return min(counts, key=lambda prefix: (-counts[prefix], prefix != "model.", len(prefix), prefix))


def _prefix_by_paths(checkpoint: TorchDistCheckpoint) -> str:
    """Prefix of the model's names if the names are unknown: a key of `_TOPS` in a nested state dict, or else empty."""
    tops = {path[:-1] for name, path in checkpoint.paths.items() if name in checkpoint.layout.tensors}
    inner = [path for path in tops if path and path[-1] in _TOPS]
    found = min(inner, key=lambda path: (_TOPS.index(str(path[-1])), len(path), path), default=())
    return "".join(f"{part}." for part in found)


def _names_under(prefix: str, checkpoint: TorchDistCheckpoint) -> dict[str, str]:
    """Names of the checkpoint's tensors that belong to the model, each with its name without the prefix."""
    return {
        name: name.removeprefix(prefix)
        for name in checkpoint.layout.tensors
        if (name.startswith(prefix) if prefix else not _is_state(name, checkpoint))
    }


def _unwrapped(names: Mapping[str, str]) -> dict[str, str]:
    """Names of the checkpoint's tensors, each with the model's name for it, without the components that wrappers
    add.
    """
    own = unwrapped_names(names.values())
    return {full: own[name] for full, name in names.items()}


def _is_state(name: str, checkpoint: TorchDistCheckpoint) -> bool:
    """Whether a tensor is not a weight. For checkpoints whose names have no prefix."""
    return len(checkpoint.paths.get(name, ())) > 1 or _STATES.match(name) is not None


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, spec.dtype, spec.shape)


def _checked(
    known: TensorForms,
    weights: Mapping[str, str],
    forms: Mapping[str, Form],
    there: Mapping[str, TensorSpec],
    parts: Mapping[str, Sequence[str]],
    prefix: str,
) -> dict[str, TensorSpec]:
    """Tensors of the model in the checkpoint's dtypes, without optional parts that the checkpoint does not contain.

    Raises LayoutError.
    """
    problems = told(list(unknown_names([name for full, name in weights.items() if full not in forms], known)))
    dtypes: dict[str, DType] = {}
    holders: dict[str, str] = {}
    for full, form in forms.items():
        spec = there[full]
        if spec.shape != form.shape and not form.is_swapped(spec.shape):
            problems.append(f"{spec} has the wrong shape: config.json says {list(form.shape)}")
        for name in form.tensors:
            if holders.setdefault(name, full) != full:
                problems.append(f"{name} occurs twice, as {holders[name]} and as {full}")
            if dtypes.setdefault(name, spec.dtype) != spec.dtype:
                problems.append(f"{name}: one part of it is {dtypes[name]}, another {spec.dtype}")
    absent = {name for names in parts.values() if dtypes.keys().isdisjoint(names) for name in names}
    problems += [f"{prefix}{name} is missing" for name in known if name not in dtypes and name not in absent]
    if problems:
        raise LayoutError(
            f"the checkpoint's weights are not those that config.json describes, in {counted(len(problems), 'tensor')}",
            details=problems[:NAMED],
            fix=f"give the config.json that belongs to the checkpoint (--config); {_OTHER_NAMES}",
        )
    return {name: TensorSpec(name, dtypes[name], known[name].shape) for name in known if name in dtypes}


def _compared(layout: Layout, copies: Mapping[str, str]) -> Iterator[Twin]:
    """Twins to compare, chunk by chunk. Chunks that share one place are equal and are skipped. Raises LayoutError."""
    placed = {place.shard: place for place in layout.placements if place.shard.tensor in copies.values()}
    for place in layout.placements:
        original = copies.get(place.shard.tensor)
        if original is None:
            continue
        other = placed.get(place.shard._replace(tensor=original))
        if other is None:
            raise LayoutError(
                f"{place.shard.tensor} and {original} are tied, and cut in different ways, so they cannot be compared",
                fix="save one of them",
            )
        if (place.buffer, place.offset) != (other.buffer, other.offset):
            yield Twin(place.shard.tensor, place, other)


def _left_out(checkpoint: TorchDistCheckpoint, taken: Mapping[str, Form], copies: Mapping[str, str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for names, what in ((checkpoint.layout.tensors, "tensors"), (checkpoint.others, "objects")):
        for name in names:
            if name in copies:
                counts["copies of other tensors"] += 1
            elif name not in taken:
                state = _STATES.match(name)
                path = checkpoint.paths.get(name, (name,))
                kind = "inv_freq" if name.endswith("inv_freq") else state[1] if state else str(path[0])
                counts[f"{readable(kind)} ({what})"] += 1
    return dict(sorted(counts.items()))


def _box(part: FormPart, whole: Box) -> Box:
    """Box of a part in the tensor in memory."""
    if not part.where:
        return whole
    return Box(tuple(at.start for at in part.where), tuple(at.stop - at.start for at in part.where))


def _first_of_run(box: Box, extent: Sequence[int]) -> int | None:
    """Index of the first element of a box in a dense tensor of this extent; None if the box is not contiguous there."""
    cut = next((axis for axis, length in enumerate(box.extent) if length > 1), len(extent))
    if any(box.extent[axis] != extent[axis] for axis in range(cut + 1, len(extent))):
        return None
    strides = [math.prod(extent[axis + 1 :]) for axis in range(len(extent))]
    return sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
