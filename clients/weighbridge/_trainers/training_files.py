"""Training states as checkpoints of Megatron-core and torch on disk. Tensors are streamed, so memory use is bounded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge._clients.calls import pull_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.connection import Connection
from weighbridge._clients.pulling import PullRun
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.references import Reference, training_of
from weighbridge._core.resources import Version
from weighbridge._core.slices import FullTensors
from weighbridge._formats.hf_folder import check_free, unwritable
from weighbridge._trainers.torch_dist.whole_folders import appearing
from weighbridge._trainers.training import rank_values
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    from weighbridge._trainers.states.checkpoints.checkpoint_values import CheckpointValues
    from weighbridge._trainers.torch_dist.folder import TorchDistFiles

__all__ = ["WrittenCheckpoint"]

log = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM's ``--load`` finds the iteration to load."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that was written.

    Attributes:
        version: the training state.
        format: ``torch_dist`` or ``dcp``.
        folder: folder of the checkpoint; for ``torch_dist`` the folder of the iteration.
    """

    version: Version
    format: str
    folder: Path


def write_checkpoint(
    connection: Connection,
    meant: Reference,
    folder: Path,
    *,
    checkpoint_format: str | None,
    replaces: bool,
    max_file_bytes: int,
    on_progress: Callable[[int, int], None],
) -> WrittenCheckpoint:
    """Write a training state as a checkpoint; see `TrainerClient.export_training`."""
    from weighbridge._trainers.states.checkpoints.checkpoint_folder import MAX_VALUES_BYTES
    from weighbridge._trainers.states.checkpoints.checkpoint_values import CheckpointValues
    from weighbridge._trainers.states.training_state import without_blobs
    from weighbridge._trainers.torch_dist.metadata import METADATA_FILE
    from weighbridge._trainers.torch_dist.writing import write_torch_dist

    if not replaces:
        check_free(folder, fix="name a new folder, or replace the existing checkpoint: --replace, replace=True")
    part = training_of(meant.model)
    known = KnownLayouts()
    plan = connection.run(pull_calls.plan_pull(known, part, meant.version))
    found, all_tensors = plan.version, plan.layout.tensors
    tensors = without_blobs(all_tensors)
    ranks = found.ranks or len(all_tensors) - len(tensors)
    nbytes = sum(spec.nbytes for name, spec in all_tensors.items() if name not in tensors)
    if nbytes > MAX_VALUES_BYTES:
        raise InvalidArgument(
            (
                f"{found.model}@{found.number} has {nbytes} bytes that are not tensors, and an "
                f"export holds at most {MAX_VALUES_BYTES} in memory"
            ),
            fix="give tensors to optimizer= rather than to state= or rank_state=; or restore it into a trainer",
        )
    blobs = [rank_values(connection, found, all_tensors, rank) for rank in range(max(ranks, 1))]
    values = CheckpointValues.of(blobs, tensors, found.step)
    _check_format(found, values.format, checkpoint_format)
    if not tensors:
        raise LayoutError(f"{found.model}@{found.number} has no tensors", fix="name a state of a model or an optimizer")
    pull = connection.run(pull_calls.plan_pull(known, part, found.number, FullTensors(tuple(tensors))))
    order = [tensors[placement.shard.tensor] for placement in pull.layout.placements]
    files = _laid_out(order, values, max_file_bytes)

    def write(into: Path) -> None:
        into.mkdir(exist_ok=True)
        write_torch_dist(into, files, PullRun(connection, pull).stream(), on_progress)

    if values.format == "dcp":
        if replaces:
            _check_replaceable(folder, METADATA_FILE)
        with appearing(folder, replace=replaces) as unfinished:
            write(unfinished)
        return WrittenCheckpoint(found, values.format, folder)
    name = f"iter_{found.step:07d}"
    if folder.exists() and any(folder.iterdir()):
        _check_replaceable(folder / name, METADATA_FILE)
        with appearing(folder / name, replace=True) as unfinished:
            write(unfinished)
        before = _tracked(folder / TRACKER_FILE)
        if before > found.step:
            log.warning("%s named iteration %d, and names %d now", folder / TRACKER_FILE, before, found.step)
        _replace_file(folder / TRACKER_FILE, str(found.step))
    else:
        with appearing(folder) as unfinished:
            write(unfinished / name)
            (unfinished / TRACKER_FILE).write_text(str(found.step))
    return WrittenCheckpoint(found, values.format, folder / name)


def _laid_out(order: list[TensorSpec], values: CheckpointValues, max_file_bytes: int) -> TorchDistFiles:
    """Return the files of a checkpoint in which chunks follow each other in the order of the tensors' bytes."""
    from weighbridge._trainers.torch_dist.chunks import chunks_of
    from weighbridge._trainers.torch_dist.folder import lay_out_torch_dist
    from weighbridge._trainers.torch_dist.metadata import METADATA_FILE

    files = lay_out_torch_dist(
        [shard for spec in order for shard in chunks_of(spec)],
        order,
        max_file_bytes,
        common=values.common,
        objects=values.objects,
        paths=values.paths,
        aliases=values.aliases,
    )
    if values.format == "torch_dist":
        return files
    # torch's own format does not have Megatron's files
    only: Mapping[str, bytes] = {METADATA_FILE: files.metadata_files[METADATA_FILE]}
    return replace(files, metadata_files=only)


def _check_format(version: Version, own: str, wanted: str | None) -> None:
    if wanted not in (None, own):
        trainer = "Megatron-core" if own == "torch_dist" else "torch"
        raise InvalidArgument(
            (
                f"{version.model}@{version.number} is the training state of {trainer}, whose "
                f"checkpoints are {own}, not {wanted}"
            ),
            fix="leave --format out"
            + ("; torch.distributed.checkpoint reads torch_dist as well" if own == "torch_dist" else ""),
        )


def _check_replaceable(folder: Path, metadata_file: str) -> None:
    """Refuse to remove a folder that is not a checkpoint."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / metadata_file).exists())):
        raise InvalidArgument(
            f"{folder} is not a checkpoint, and an export does not replace it", fix="name another folder"
        )


def _tracked(path: Path) -> int:
    """Return the iteration that a tracker file names; 0 if the file does not exist or does not name one."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _replace_file(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
