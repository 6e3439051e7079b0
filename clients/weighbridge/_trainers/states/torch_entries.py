"""Entries of torch's checkpoints that are not tensors of the module or optimizer: values by their paths in the saved
nested state dict.

Names are those that torch.distributed.checkpoint gives: ``optimizer.param_groups.0.lr``, ``scheduler.last_epoch``.
Options of a parameter group may also be named by parameter, as with ``flatten_optimizer_state_dict``:
``optimizer.param_groups.<parameter>.lr``. Both forms are supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weighbridge._formats.naming.parameter_names import parameter_in
from weighbridge._trainers.torch_dist.metadata import KeyPath
from weighbridge.errors import InvalidArgument

MODEL, OPTIMIZER, RANK_STATE = "model", "optimizer", "rank_state"
_GROUPS = "param_groups"
_STATE = "state"
_PARAMS = "params"


def entries_of(
    trainer: Mapping[str, Any], state: Mapping[str, Any], rank_states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return the entries by name, and the path of each.

    Args:
        trainer: values from `torch_training.training_tensors`.
        state: values that the trainer has named; they are at the top level.
        rank_states: values that the trainer has named for each rank; they are below ``rank_state`` and the rank.

    Raises:
        InvalidArgument: the trainer has used the name of the module, the optimizer or the ranks' own values for
            something else.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    taken = sorted({MODEL, OPTIMIZER, RANK_STATE} & state.keys())
    if taken:
        raise InvalidArgument(
            f"state= has values with the names {', '.join(taken)}, which are reserved in a checkpoint of torch",
            fix="push them under another name",
        )
    nested: dict[str, Any] = {MODEL: dict(trainer[MODEL]), **state}
    optimizer = trainer.get(OPTIMIZER)
    if optimizer is not None:
        numbers = {name: _nested(found.items()) for name, found in optimizer[_STATE].items()}
        by_parameter = {
            f"{_GROUPS}.{name}.{option}": value
            for group in optimizer[_GROUPS]
            for name in group[_PARAMS]
            for option, value in group.items()
            if option != _PARAMS
        }
        nested[OPTIMIZER] = {_STATE: numbers, _GROUPS: optimizer[_GROUPS], **by_parameter}
    if any(rank_states):
        nested[RANK_STATE] = {str(rank): dict(each) for rank, each in enumerate(rank_states)}
    return flatten_state_dict(nested)


def paths_of_tensors(tensors: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, KeyPath]:
    """Return the paths of the tensors of module and optimizer.

    The name of a parameter is one key, although it contains dots.
    """
    parameters = {name.removeprefix(f"{MODEL}.") for name in (*tensors, *aliases) if name.startswith(f"{MODEL}.")}
    paths: dict[str, KeyPath] = {f"{MODEL}.{name}": (MODEL, name) for name in parameters}
    begin = f"{OPTIMIZER}.{_STATE}."
    for name in tensors:
        inner = name.removeprefix(begin)
        parameter = parameter_in(inner.rpartition(".")[0], parameters)
        if name.startswith(begin) and parameter is not None:
            paths[name] = (OPTIMIZER, _STATE, parameter, *inner[len(parameter) + 1 :].split("."))
    return paths


def optimizer_values(entries: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return values in the form of `torch_optimizers.NamedOptimizers.values`, from the entries of an optimizer by their
    paths within it.
    """
    groups = _nested({path[1:]: value for path, value in entries.items() if path[0] == _GROUPS}.items())
    if not groups:
        groups = _merged(entries)
    numbers: dict[str, dict[KeyPath, Any]] = {}
    for path, value in entries.items():
        if path[0] == _STATE and len(path) > 2:
            numbers.setdefault(str(path[1]), {})[path[2:]] = value
    return {_STATE: numbers, _GROUPS: groups}


def _merged(entries: Mapping[KeyPath, Any]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer whose entries are options of single parameters.

    Parameters with equal options form one group.
    """
    options: dict[str, dict[str, Any]] = {}
    for path, value in entries.items():
        if len(path) == 1 and str(path[0]).startswith(f"{_GROUPS}."):
            parameter, _, option = str(path[0]).removeprefix(f"{_GROUPS}.").rpartition(".")
            options.setdefault(parameter, {})[option] = value
    groups: list[dict[str, Any]] = []
    for parameter, found in options.items():
        alike = next((group for group in groups if {**group, _PARAMS: 0} == {**found, _PARAMS: 0}), None)
        if alike is None:
            groups.append({**found, _PARAMS: [parameter]})
        else:
            alike[_PARAMS].append(parameter)
    return groups


def nested(entries: Mapping[Any, Any]) -> Any:
    """Return the nested value that entries form: dicts for string keys, lists for numbers.

    An entry with an empty path is the whole value.
    """
    return entries[()] if () in entries else _nested(entries.items())


def _nested(entries: Any) -> Any:
    below: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in entries:
        below.setdefault(path[0], {})[path[1:]] = value
    made = {key: nested(found) for key, found in below.items()}
    if made and all(isinstance(key, int) for key in made):
        return [made[key] for key in sorted(made)]
    return made
