"""Optimizer of FSDP2 in checkpoints for which each rank has saved its own files with ``torch.save``, as verl's
``FSDPCheckpointManager`` does.

In addition to the files of the module (`rank_files`), the folder contains ``optim_world_size_<ranks>_rank_<rank>.pt``,
the result of ``optimizer.state_dict()``: the state by numbers of parameters, as DTensors and plain values, and the
parameter groups. A number is the parameter's index among all parameters of the optimizer. verl passes
``module.parameters()`` to the optimizer, whose order is that of the module's DTensors, with a tied one counted once.
``extra_state_...`` contains the scheduler and random states. Source: verl 0.9
(``verl/utils/checkpoint/fsdp_checkpoint_manager.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.shortening import shown
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint
from weighbridge._trainers.torch_dist.items import described
from weighbridge._trainers.torch_dist.pickles import Instance
from weighbridge._trainers.torch_dist.rank_files import (
    files_of,
    is_dtensor,
    open_rank_file,
    read_files,
)
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound

_FSDP1 = (
    "save the optimizer of FSDP2 (fully_shard); that of FSDP1 keeps flat ranges without the names of their parameters"
)


@dataclass(frozen=True)
class CheckpointOptimizer:
    """The optimizer of a checkpoint.

    Attributes:
        checkpoint: the optimizer's tensors, by ``state.<parameter>.<key>``, with their places.
        numbers: values of the state that are not tensors, by parameter and path.
        groups: the parameter groups, with names in ``params``.
    """

    checkpoint: TorchDistCheckpoint
    numbers: Mapping[str, Mapping[tuple[str, ...], Any]]
    groups: Sequence[Mapping[str, Any]]


def read_optimizer(folder: Path, parameters: Mapping[str, tuple[int, ...]]) -> CheckpointOptimizer | None:
    """Find the state of an untrusted optimizer without reading tensors; None if the folder does not contain files of an
    optimizer.

    Args:
        folder: the checkpoint.
        parameters: shapes of the module's parameters by name, in the module's order.

    Raises:
        NotFound: the file of a rank is missing.
        DataLoss: a file is damaged, cut short, or contains names that do not belong in such a checkpoint.
        InvalidArgument: the optimizer was saved by FSDP1.
        LayoutError: the optimizer has other parameters, or ranks disagree.
    """
    try:
        files = files_of(folder, "optim")
    except NotFound as error:
        if error.details:  # some of the files exist
            raise
        return None
    names = list(parameters)
    checkpoint = read_files(folder, files, partial(_tensors, names))
    problems = [
        f"{shown(name)} has shape {list(spec.shape)}, but its parameter has {list(parameters[_parameter(name)])}"
        for name, spec in checkpoint.layout.tensors.items()
        if spec.shape not in ((), parameters[_parameter(name)])
    ]
    if problems:
        raise LayoutError(
            f"the optimizer in {folder} does not belong to the model in the same folder",
            details=first_lines(problems),
            fix="build the optimizer from all of module.parameters(), in their order",
        )
    with open_rank_file(folder, files[0]) as (_, root):
        numbers: dict[str, dict[tuple[str, ...], Any]] = {}
        for index, state in root["state"].items():
            found: dict[tuple[str, ...], Any] = {
                (key,): value for key, value in state.items() if type(value) is not Instance
            }
            if found:
                numbers[names[index]] = found
        return CheckpointOptimizer(checkpoint, numbers, _groups(root.get("param_groups"), names))


def read_scheduler(folder: Path) -> dict[str, Any] | None:
    """Return the state of the scheduler that rank 0 has saved; None if rank 0 has not saved one.

    Raises:
        DataLoss: the file is damaged, or contains something other than a scheduler and random states.
        InvalidArgument: the scheduler's state contains values that are not plain.
    """
    try:
        file = files_of(folder, "extra_state")[0]
    except NotFound:
        return None
    with open_rank_file(folder, file) as (_, root):
        found = root.get("lr_scheduler") if type(root) is dict else None
    if found is not None and (type(found) is not dict or not _is_plain(found)):
        raise InvalidArgument(
            f"the scheduler in {file} of {folder} contains values that are not plain",
            fix="move the files extra_state_* elsewhere to leave it out",
        )
    return found


def _tensors(names: Sequence[str], root: Any) -> dict[str, Any]:
    """Return the tensors in one rank's optimizer state."""
    state = root.get("state") if type(root) is dict else None
    if type(state) is not dict:
        raise DataLoss(
            "a rank has saved something other than optimizer.state_dict() as its optimizer",
            fix="save what optimizer.state_dict() returns, as verl's FSDP engine does",
        )
    found: dict[str, Any] = {}
    for index, of in state.items():
        if type(index) is not int or not 0 <= index < len(names) or type(of) is not dict:
            raise LayoutError(
                (
                    f"the optimizer has state of parameter {shown(str(index))}, but the model has "
                    f"{counted(len(names), 'sharded parameter')}"
                ),
                fix="build the optimizer from all of module.parameters(), in their order",
            )
        for key, value in of.items():
            name = f"state.{names[index]}.{key}"
            if type(key) is not str or "." in key:
                raise DataLoss(f"{shown(name)}: a key of an optimizer's state must be a string without dots")
            if type(value) is not Instance:
                if not _is_plain(value):
                    raise InvalidArgument(f"{shown(name)} is neither a tensor nor a plain value")
            elif not is_dtensor(value) and described(value).shape:
                raise InvalidArgument(
                    f"{shown(name)} is a plain tensor of one rank, and its parameter is shared", fix=_FSDP1
                )
            else:
                found[name] = value
    return found


def _groups(groups: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    taken: list[int] = []
    for number, group in enumerate(groups if type(groups) is list else ()):
        members = group.get("params") if type(group) is dict else None
        if type(members) is not list or any(type(each) is not int for each in members):
            raise DataLoss(f"group {number} of the optimizer does not list its parameters")
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if not _is_plain(options):
            raise InvalidArgument(f"group {number} of the optimizer has options that are not plain values")
        taken += members
        made.append({"params": [names[each] if 0 <= each < len(names) else "" for each in members], **options})
    if sorted(taken) != list(range(len(names))):
        raise LayoutError(
            (
                f"the optimizer has {counted(len(taken), 'parameter')}, but the model has "
                f"{counted(len(names), 'sharded one')}"
            ),
            fix="build the optimizer from all of module.parameters(), in their order",
        )
    return made


def _parameter(name: str) -> str:
    return name.removeprefix("state.").rpartition(".")[0]


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(child) for key, child in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)
