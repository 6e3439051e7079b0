"""Checks that a training state can be restored from a checkpoint, by the names of its entries. Other checkpoints are
refused at the import, and not only after a crash.

A restore finds the module under ``model`` and its optimizer under ``optimizer``, by the parameter names of
``torch.distributed.checkpoint.state_dict``. It finds Megatron-core's optimizers by the keys of the model, as
``fully_reshardable`` and plain optimizers write them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.naming.parameter_names import parameter_in, unwrapped_names
from weighbridge._trainers.states.torch_entries import MODEL, OPTIMIZER
from weighbridge._trainers.torch_dist.metadata import KeyPath
from weighbridge.errors import InvalidArgument, LayoutError

T = TypeVar("T")

_MODEL, _STATE, _GROUPS = f"{MODEL}.", f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
_BY_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
"""Keys of Megatron's distributed optimizer that refer to its buffers instead of parameters. All forms except
``fully_reshardable`` have such keys.
"""
_NO_WEIGHTS = re.compile(
    r"(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine|common_state)\b"
)
_SAVE_BOTH = (
    "save module and optimizer as one checkpoint: model, optim = get_state_dict(module, "
    "optimizer) of torch.distributed.checkpoint.state_dict, "
    'then dcp.save({"model": model, "optimizer": optim}, checkpoint_id=FOLDER)'
)


def check_megatron(names: Collection[str]) -> None:
    """Refuse a Megatron-core checkpoint from which a rank could not be restored.

    Args:
        names: names of all entries.

    Raises:
        InvalidArgument: the distributed optimizer is stored by buffers, or the checkpoint does not contain a model.
    """
    buffers = [name for name in names if _BY_BUFFERS.match(name)]
    if buffers:
        raise InvalidArgument(
            "the distributed optimizer is stored by the buffers of the ranks that saved it, "
            f"in {counted(len(buffers), 'entry', 'entries')}, "
            "and does not fit other ranks",
            details=first_lines(buffers),
            fix="save it as fully_reshardable: --dist-ckpt-optim-fully-reshardable of "
            "Megatron-LM; or push the state from the ranks, "
            "which accepts this form: trainer.push(..., optimizer=optimizer)",
        )
    if all(_NO_WEIGHTS.match(name) for name in names):
        raise InvalidArgument(
            "the checkpoint does not contain the weights of a model",
            details=first_lines(sorted(names)),
            fix="save the model with its optimizer, in one checkpoint",
        )


@dataclass(frozen=True)
class TorchEntries:
    """The entries of a checkpoint of torch.

    Attributes:
        names: name of each entry, by its name in the checkpoint; without the parts that wrappers add.
        parameters: names of the module's tensors, by their names in the checkpoint; without the parts that wrappers
            add.
        tensors: names of the entries that are tensors.
        members: names of the entries that list the parameters of a group.
        misplaced: names other than ``optimizer`` under which there are optimizers.
    """

    names: Mapping[str, str]
    parameters: Mapping[str, str]
    tensors: tuple[str, ...]
    members: tuple[str, ...]
    misplaced: tuple[str, ...] = ()

    @staticmethod
    def of(tensors: Iterable[str], others: Iterable[str], paths: Mapping[str, KeyPath]) -> TorchEntries:
        """The entries of a checkpoint.

        Args:
            tensors: names of the entries that are tensors.
            others: names of the other entries.
            paths: path of each entry in the nested state dict.

        Raises:
            LayoutError: two entries would have the same name without the parts that wrappers add.
        """
        tensors, others = tuple(tensors), tuple(others)
        given = [name.removeprefix(_MODEL) for name in (*tensors, *others) if name.startswith(_MODEL)]
        own = unwrapped_names(given)
        names = {name: _renamed(name, own) for name in (*tensors, *others)}
        if len(set(names.values())) < len(names):
            raise LayoutError(
                "the optimizer has state of several parameters whose names are the same without those of wrappers"
            )
        members = (
            name
            for name in others
            if paths.get(name, ())[:2] == (OPTIMIZER, "param_groups") and paths[name][-1] == "params"
        )
        tops = {
            str(path[0])
            for name in others
            if len(path := paths.get(name, ())) > 1 and str(path[1]).partition(".")[0] == "param_groups"
        }
        return TorchEntries(names, own, tensors, tuple(members), tuple(sorted(tops - {OPTIMIZER})))

    def check(self, members: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from which a module, or its optimizer, could not be restored.

        Args:
            members: values of the entries in `members`, which are lists of names.

        Raises:
            InvalidArgument: the checkpoint does not contain a module, or its optimizer does not name its parameters.
        """
        if not self.parameters:
            raise InvalidArgument(
                "the checkpoint has no module under 'model', so it cannot be restored into a trainer",
                details=list(self.tensors[:3]),
                fix=_SAVE_BOTH,
            )
        if self.misplaced:
            raise InvalidArgument(
                (
                    "the checkpoint has an optimizer under "
                    f"{' and '.join(map(repr, self.misplaced))}, but a restore reads it from "
                    "'optimizer'"
                ),
                fix=_SAVE_BOTH,
            )
        states = [name for name in self.tensors if name.startswith(_STATE)]
        numbered = [
            name
            for name in states
            if name.removeprefix(_STATE).split(".")[0].isdigit() and _parameter(name, _STATE, self.parameters) is None
        ]
        numbered += [
            name
            for name, value in members.items()
            if isinstance(value, list) and any(type(each) is int for each in value)
        ]
        if numbered:
            raise InvalidArgument(
                (
                    "the optimizer refers to its parameters by number, as optimizer.state_dict() "
                    "does, and the checkpoint does not contain their names"
                ),
                details=numbered[:3],
                fix=_SAVE_BOTH,
            )
        if states and all(_parameter(name, _STATE, self.parameters) is None for name in states):
            raise InvalidArgument(
                "the optimizer has state of parameters that are not in the module",
                details=states[:3] + [f"the module has {name}" for name in list(self.parameters.values())[:3]],
                fix=_SAVE_BOTH,
            )

    def renamed(self, values: Mapping[str, T]) -> dict[str, T]:
        """Values of entries, by names without the parts that wrappers add."""
        return {self.names[name]: value for name, value in values.items()}

    def renamed_paths(self, paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
        """Paths of entries, with names and keys without the parts that wrappers add."""
        found: dict[str, KeyPath] = {}
        for name, path in paths.items():
            keys = [
                self.parameters.get(key)
                or _renamed(f"{OPTIMIZER}.{key}", self.parameters).removeprefix(f"{OPTIMIZER}.")
                if isinstance(key, str)
                else key
                for key in path
            ]
            found[self.names.get(name, name)] = tuple(keys)
        return found

    def renamed_members(self, members: Mapping[str, Any]) -> dict[str, list[str]]:
        """The values of `members` in which names change, with the changed names."""
        found = {}
        for name, value in members.items():
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                own = [self.parameters.get(each, each) for each in value]
                if own != value:
                    found[name] = own
        return found


def _renamed(name: str, own: Mapping[str, str]) -> str:
    """Return an entry's name with its parameter's name as in the module."""
    for prefix in (_MODEL, _STATE, _GROUPS):
        given = _parameter(name, prefix, own)
        if given is not None:
            return prefix + own[given] + name[len(prefix) + len(given) :]
    return name


def _parameter(name: str, prefix: str, parameters: Collection[str]) -> str | None:
    """Return the parameter whose name follows a prefix in an entry's name; None if no name does."""
    return parameter_in(name.removeprefix(prefix), parameters) if name.startswith(prefix) else None
