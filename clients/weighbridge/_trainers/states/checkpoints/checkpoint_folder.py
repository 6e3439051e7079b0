"""Checkpoint on disk with the state of its optimizer, read as the training state of one rank that holds all of it.

Its tensors keep their names, except for the prefixes of Megatron's chained optimizers, and are read directly from the
checkpoint's files.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from weighbridge._core.boxes import Box, first_overlap, gaps
from weighbridge._core.layouts import Layout
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.naming.parameter_names import unwrapped_name
from weighbridge._formats.push_sources import HeldShards, MappedSource
from weighbridge._formats.safetensors_files import map_file
from weighbridge._trainers.states.checkpoints.checkpoint_step import step_named, step_of_folder
from weighbridge._trainers.states.checkpoints.checkpoint_values import (
    CheckpointFormat,
    CheckpointValues,
)
from weighbridge._trainers.states.checkpoints.restorable import TorchEntries, check_megatron
from weighbridge._trainers.states.torch_entries import MODEL, OPTIMIZER
from weighbridge._trainers.states.training_state import (
    RankValues,
    TrainingState,
    TrainingTensors,
    without_blobs,
)
from weighbridge._trainers.torch_dist.folder import (
    TorchDistCheckpoint,
    read_common,
    read_objects,
    read_torch_dist,
)
from weighbridge._trainers.torch_dist.metadata import CONFIG_FILE, saved
from weighbridge._trainers.torch_dist.noted_values import read_value
from weighbridge._trainers.torch_dist.optimizer_rank_files import read_optimizer, read_scheduler
from weighbridge._trainers.torch_dist.rank_files import has_rank_files, read_rank_files, sharded_parameters
from weighbridge.errors import LayoutError

MAX_VALUES_BYTES = 1 << 30
"""Maximum number of bytes of the entries that are not tensors. They are in memory while the checkpoint is pushed."""
_CHAINED = re.compile(r"^chained_\d+\.(?=optimizer\.)")


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint.

    Attributes:
        format: ``torch_dist`` for Megatron-core, ``dcp`` for torch, ``rank_files`` for FSDP2 with a file for each rank.
        layout: the chunks of the tensors, and the blob with all other values, as one stream.
        space: tensor space of the names.
        shards: the shards of the stream.
        step: step in the checkpoint or in the name of its folder; None if neither contains one. For verl it is in the
            name of the parent folder.
    """

    format: CheckpointFormat | Literal["rank_files"]
    layout: Layout
    space: TensorSpace
    shards: HeldShards = field(repr=False)
    step: int | None

    @staticmethod
    def read(folder: Path) -> CheckpointFolder:
        """Read a checkpoint without the data of its tensors, and without executing code from it.

        Raises:
            NotFound: the folder has no checkpoint, or a file of it is missing.
            DataLoss: the checkpoint is damaged or cut short.
            InvalidArgument: a tensor has an unsupported dtype or name, the other values are larger than
                `MAX_VALUES_BYTES`, or nothing can be restored from the checkpoint, because its optimizer is in an
                unsupported form or is stored without a model.
            LayoutError: a part of a tensor is missing or occurs twice (names each tensor).
        """
        if has_rank_files(folder):
            return _of_ranks(folder)
        found = _named(read_torch_dist(folder))
        _check_whole(found.layout)
        kind: CheckpointFormat = "torch_dist" if (folder / CONFIG_FILE).exists() else "dcp"
        objects = read_objects(folder, found.others, MAX_VALUES_BYTES)
        if kind == "dcp":
            entries = TorchEntries.of(found.layout.tensors, found.others, found.paths)
            members = {name: read_value(folder, found.others[name]) for name in entries.members}
            entries.check(members)
            objects |= {name: saved(value) for name, value in entries.renamed_members(members).items()}
            found, objects = _renamed(found, entries), entries.renamed(objects)
        else:
            check_megatron([*found.layout.tensors, *found.others])
        common = read_common(folder, MAX_VALUES_BYTES) if kind == "torch_dist" else None
        values = CheckpointValues(kind, objects, found.paths, common).kept()
        space = TensorSpace.MEGATRON if kind == "torch_dist" else TensorSpace.HUGGING_FACE
        return _pushed(folder, kind, found.layout, space, values, step_of_folder(folder, found))


def _pushed(
    folder: Path,
    kind: CheckpointFormat | Literal["rank_files"],
    layout: Layout,
    space: TensorSpace,
    values: RankValues,
    step: int | None,
) -> CheckpointFolder:
    """Return the tensors in files, with these values, as the push of a single rank that holds all of them."""
    stream = Layout.stream(layout.tensors.values(), [place.shard for place in layout.placements])
    own = RankValues(state=values.state)
    state = TrainingState.of(TrainingTensors(stream, (), values.trainer, space), own, 0)
    names = dict.fromkeys(place.buffer for place in layout.placements)
    files = {name: map_file(folder, name) for name in names} | {"": state.tensors[-1].numpy()}
    places = [*layout.placements, state.layout.placements[-1]._replace(buffer="", offset=0)]
    return CheckpointFolder(kind, state.layout, space, MappedSource(state.layout, places, files), step)


def _of_ranks(folder: Path) -> CheckpointFolder:
    """Read an FSDP2 checkpoint with separate files for each rank, with module and optimizer under the names that
    torch's trainers use.
    """
    parameters, tied = sharded_parameters(folder)
    model = read_rank_files(folder).layout
    optimizer = read_optimizer(folder, parameters)
    parts = [_prefixed(model.without(tied), f"{MODEL}.")]
    trainer: dict[str, Any] = {
        MODEL: {},
        "tied": {unwrapped_name(name): unwrapped_name(kept) for name, kept in tied.items()},
    }
    if optimizer is not None:
        parts.append(_prefixed(optimizer.checkpoint.layout, f"{OPTIMIZER}."))
        numbers = {unwrapped_name(name): dict(found) for name, found in optimizer.numbers.items()}
        groups = [{**group, "params": [unwrapped_name(name) for name in group["params"]]} for group in optimizer.groups]
        trainer[OPTIMIZER] = {"state": numbers, "param_groups": groups}
    layout = Layout(
        {name: spec for part in parts for name, spec in part.tensors.items()},
        tuple(place for part in parts for place in part.placements),
    )
    _check_whole(layout)
    scheduler = read_scheduler(folder)
    values = RankValues(trainer, {} if scheduler is None else {"lr_scheduler": scheduler})
    return _pushed(folder, "rank_files", layout, TensorSpace.HUGGING_FACE, values, step_named(folder))


def _prefixed(layout: Layout, prefix: str) -> Layout:
    """Return a layout whose tensors' names have this prefix, and no names of wrappers."""
    return layout.renamed({name: prefix + unwrapped_name(name) for name in layout.tensors})


def _named(found: TorchDistCheckpoint) -> TorchDistCheckpoint:
    """Return a checkpoint without the prefixes of chained optimizers. Raises LayoutError if two tensors would have the
    same name, or a tensor would have the name of a blob.
    """
    taken = found.layout.tensors.keys() - without_blobs(found.layout.tensors).keys()
    if taken:
        raise LayoutError(
            (
                f"{counted(len(taken), 'tensor has a name', 'tensors have names')} that training "
                "states reserve for values of ranks"
            ),
            details=first_lines(sorted(taken)),
            fix="save each rank's own values under a name other than rank_state",
        )
    names = {name: _CHAINED.sub("", name) for name in found.layout.tensors}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise LayoutError("several optimizers keep state of the same tensors", details=first_lines(sorted(twice)))
    return replace(found, layout=found.layout.renamed(names))


def _renamed(found: TorchDistCheckpoint, entries: TorchEntries) -> TorchDistCheckpoint:
    """Return a checkpoint whose parameters do not have names of wrappers."""
    return replace(
        found,
        layout=found.layout.renamed({name: entries.names[name] for name in found.layout.tensors}),
        others=entries.renamed(found.others),
        paths=entries.renamed_paths(found.paths),
    )


def _check_whole(layout: Layout) -> None:
    problems = []
    for name, spec in layout.tensors.items():
        boxes = [layout.placements[index].shard.box for index in layout.by_tensor.get(name, ())]
        overlap = first_overlap(boxes)
        missing = next(gaps(Box.whole(spec.shape), boxes), None) if spec.nbytes else None
        if overlap is not None:
            problems.append(f"{spec} {overlap[2]} is stored twice")
        elif missing is not None:
            problems.append(f"{spec} {missing} is missing")
    if problems:
        raise LayoutError(
            f"the checkpoint does not contain every part of {counted(len(problems), 'tensor')} exactly once",
            details=first_lines(problems),
            fix=(
                "use a checkpoint that was saved completely: .metadata is written after all ranks "
                "have written their files"
            ),
        )
