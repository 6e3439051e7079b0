"""State of torch optimizers by the names of their parameters, and back.

Names are those of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.<parameter>.exp_avg``. The state is read directly from ``optimizer.state``,
because torch's function makes a step with an optimizer that has not made one, and the function that loads a state dict
casts moments to their parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.naming.parameter_names import parameter_in
from weighbridge._trainers.states.boxed_tensors import BoxedTensors
from weighbridge._trainers.states.torch_entries import nested
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_STATE = "state."
PARAMS = "params"
_OWN = frozenset((PARAMS, "param_names"))
"""Entries of a group that list its parameters. They are not restored."""
_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
"""Options that torch's schedulers add to groups."""
Path = tuple[str, ...]


@dataclass(frozen=True)
class StatePart:
    """Boxes of a tensor of the optimizer's state: its spec, and each box with a tensor of the box's shape."""

    spec: TensorSpec
    held: Sequence[tuple[Box, torch.Tensor]]


@dataclass(frozen=True)
class NamedOptimizers:
    """Optimizers of one module, with the module's names of their parameters.

    Attributes:
        optimizers: the optimizers.
        names: names of all their parameters.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    names: Mapping[torch.Tensor, str]

    @staticmethod
    def of(optimizers: Any, names: Mapping[torch.Tensor, str]) -> NamedOptimizers:
        """Check optimizers of a module, and name their parameters.

        Args:
            optimizers: one optimizer, or several.
            names: the module's names of its parameters.

        Raises:
            InvalidArgument: one of them is not a torch optimizer.
            LayoutError: the optimizers have parameters that the module does not have, or share a parameter (names
                each).
        """
        import torch

        several = isinstance(optimizers, Iterable) and not isinstance(optimizers, torch.optim.Optimizer)
        found: tuple[Any, ...] = tuple(optimizers) if several else (optimizers,)
        for each in found:
            if not isinstance(each, torch.optim.Optimizer):
                raise InvalidArgument(
                    f"a {type(each).__name__} is not an optimizer of torch",
                    fix="give one torch.optim.Optimizer, or a list",
                )
        own: dict[torch.Tensor, str] = {}
        foreign, twice = [], []
        for where, parameter in _parameters(found):
            name = names.get(parameter)
            if name is None:
                foreign.append(f"{where} is {parameter.dtype}{list(parameter.shape)}")
            elif parameter in own:
                twice.append(name)
            else:
                own[parameter] = name
        if foreign:
            raise LayoutError(
                f"the optimizer has {counted(len(foreign), 'parameter')} that the module does not have",
                details=first_lines(foreign),
                fix=(
                    "give the optimizer that was built from this module's parameters, after "
                    "fully_shard or anything else that replaces them"
                ),
            )
        if twice:
            raise LayoutError(f"optimizers share {counted(len(twice), 'parameter')}", details=first_lines(twice))
        return NamedOptimizers(found, own)

    def take_into(self, boxed: BoxedTensors, prefix: str) -> None:
        """Add all tensors of the optimizers' state with a prefix to their names, and problems for those that could not
        be restored.
        """
        import torch

        for name, _, state in self._states():
            boxed.problems += [
                f"{prefix}{_STATE}{name}[{key!r}]: a key of an optimizer's state must be a string without dots"
                for key in state
                if not isinstance(key, str) or "." in key
            ]
            for path, value in _leaves(state):
                full = prefix + _STATE + ".".join((name, *path))
                if isinstance(value, torch.Tensor):
                    boxed.take(full, value)
                elif _has_tensors(value):
                    boxed.problems.append(f"{full}: it is a {type(value).__name__} that contains tensors")

    def values(self) -> dict[str, Any]:
        """Return the optimizers' state other than tensors: numbers by parameter, the parameter groups, and the kind of
        optimizer of each group.
        """
        import torch

        numbers: dict[str, dict[Path, Any]] = {}
        for name, _, state in self._states():
            found = {path: value for path, value in _leaves(state) if not isinstance(value, torch.Tensor)}
            if found:
                numbers[name] = found
        groups = [
            {PARAMS: [self.names[each] for each in group[PARAMS]]} | own_options(group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        kinds = [kind_of(optimizer) for optimizer in self.optimizers for _ in optimizer.param_groups]
        return {"state": numbers, "param_groups": groups, "kinds": kinds}

    def fit(self, stored: Mapping[str, TensorSpec], values: Mapping[str, Any], *, strict: bool) -> OptimizerFit:
        """Fit optimizers, which may not have made a step yet, to a stored state.

        After the restore they have exactly the stored state.

        Args:
            stored: the stored tensors, by the names of `take_into`.
            values: result of `values`.
            strict: whether both must have the same parameters and the same kind of optimizer. If False, state that only
                one of them has is unchanged, and kinds are distinguished only by the options of groups.
        """
        groups = Groups(values["param_groups"], values.get("kinds", ()))
        known = {name: parameter for parameter, name in self.names.items()}
        entries, foreign = _entries(stored, values["state"], known)
        fit = OptimizerFit([*foreign, *groups.unlike(known, entries)] if strict else [])
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                members = [self.names[parameter] for parameter in group[PARAMS]]
                found = groups.fit(fit, number, members, group, kind_of(optimizer) if strict else None)
                fit.problems.extend(_another_kind(optimizer, number, group, found))
                for parameter, name in zip(group[PARAMS], members, strict=True):
                    if name not in groups.names and name not in entries:
                        continue
                    there = dict(_leaves(optimizer.state.get(parameter, {})))
                    state = entries.get(name, {})
                    for path, spec in state.items():
                        if isinstance(spec, TensorSpec):
                            state[path] = fit.tensors[spec.name] = _target(
                                spec, path, there.get(path), parameter, group | dict(found)
                            )
                    fit.states.append((optimizer, parameter, state))
        return fit

    def _states(self) -> Iterator[tuple[str, torch.Tensor, Mapping[Any, Any]]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group[PARAMS]:
                    # uses get, because indexing a defaultdict creates an entry, as if a step had been made
                    yield self.names[parameter], parameter, optimizer.state.get(parameter, {})


@dataclass(frozen=True)
class OptimizerFit:
    """Fit of optimizers to a stored state.

    Attributes:
        problems: one line for each mismatch.
        tensors: tensors to fill, by name: those of the optimizers if they have such a tensor, new ones otherwise.
        parts: parts to fill, of tensors of which the rank holds only ranges.
        states: state of each parameter by path; empty for parameters that must not have state.
        options: options of each group.
    """

    problems: list[str]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: list[StatePart] = field(default_factory=list)
    states: list[tuple[torch.optim.Optimizer, torch.Tensor, Mapping[Path, Any]]] = field(default_factory=list)
    options: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)

    def finish(self) -> None:
        """Put tensors and values into the optimizers."""
        for optimizer, parameter, state in self.states:
            if state:
                optimizer.state[parameter] = nested(state)
            else:
                optimizer.state.pop(parameter, None)
        for group, found in self.options:
            for key, value in own_options(found).items():
                _set_option(group, key, value)


def _another_kind(
    optimizer: torch.optim.Optimizer, number: int, group: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[str]:
    """Return a line if a stored group belongs to another kind of optimizer, which means that each side has options that
    the other lacks. If a release of torch only adds options, the kind is the same.
    """
    lacking = sorted(set(optimizer.defaults) - set(stored)) if stored else []
    unknown = sorted(set(own_options(stored)) - set(group) - _SCHEDULERS)
    if not lacking or not unknown:
        return []
    return [
        (
            f"group {number} of the optimizer ({type(optimizer).__name__}) has "
            f"{', '.join(lacking)}; the version's has {', '.join(unknown)} instead"
        )
    ]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class.

    For a wrapper, such as accelerate's, return the name of the wrapped optimizer's class.
    """
    import torch

    inner = getattr(optimizer, "optimizer", None)
    return kind_of(inner) if isinstance(inner, torch.optim.Optimizer) else type(optimizer).__name__


class Groups:
    """Stored parameter groups, by their parameters.

    Args:
        groups: the groups.
        kinds: kind of optimizer of each group; empty if it was not stored.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ()) -> None:
        self._groups = groups
        self._kinds = kinds
        self.names = {name: index for index, group in enumerate(groups) for name in group[PARAMS]}

    def unlike(self, known: Collection[str], filled: Collection[str]) -> list[str]:
        """Return lines for parameters that only the stored groups have, or only the optimizer's groups. A parameter in
        ``filled`` is not a mismatch: its group belongs to another rank.
        """
        return [
            f"{name} is in a parameter group of the version, and in none of the optimizer's"
            for name in self.names
            if name not in known
        ] + [
            f"{name} is in a parameter group of the optimizer, and in none of the version's"
            for name in known
            if name not in self.names and name not in filled
        ]

    def fit(
        self,
        fit: OptimizerFit,
        number: int,
        members: Sequence[str],
        group: dict[str, Any],
        kind: str | None,
    ) -> Mapping[str, Any]:
        """Find the stored group for a group of the optimizer, and add its options, or problems, to a fit.

        Args:
            fit: the fit.
            number: number of the optimizer's group.
            members: names of the group's parameters.
            group: the group.
            kind: kind of the optimizer, if the stored group must have the same; None otherwise.
        """
        found = {self.names[name]: name for name in reversed(members) if name in self.names}
        if len(found) > 1:
            said = ", ".join(f"{name} of group {index}" for index, name in sorted(found.items()))
            fit.problems.append(
                f"group {number} of the optimizer has parameters of several groups of the version: {said}"
            )
        kinds = {self._kinds[index] for index in found} if self._kinds and kind else set()
        if kinds - {kind}:
            fit.problems.append(
                f"group {number} of the optimizer is of {kind}; the version's is of {', '.join(sorted(kinds))}"
            )
        stored = self._groups[next(iter(found))] if len(found) == 1 else {}
        fit.options.append((group, stored))
        return stored


def _entries(
    stored: Mapping[str, TensorSpec], numbers: Mapping[str, Mapping[Path, Any]], known: Collection[str]
) -> tuple[dict[str, dict[Path, Any]], list[str]]:
    """Return the stored numbers and tensors of each known parameter, and lines for tensors of unknown parameters."""
    entries = {name: dict(found) for name, found in numbers.items() if name in known}
    foreign = []
    for full, spec in stored.items():
        inner = full.removeprefix(_STATE)
        name = parameter_in(inner.rpartition(".")[0], known)
        if name is not None:
            entries.setdefault(name, {})[tuple(inner[len(name) + 1 :].split("."))] = spec
        else:
            foreign.append(f"the optimizer has no parameter for {spec}")
    return entries, foreign


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for which, optimizer in enumerate(optimizers):
        of = f" of optimizer {which}" if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group[PARAMS]):
                yield f"parameter {index} of group {number}{of}", parameter


def _leaves(state: Mapping[Any, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of the nested dicts of a state, with their paths.

    A dict with keys other than strings is itself a leaf.
    """
    for key, value in state.items():
        if isinstance(value, dict) and value and all(isinstance(each, str) and "." not in each for each in value):
            yield from _leaves(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def _has_tensors(value: Any) -> bool:
    import torch

    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _target(
    spec: TensorSpec, path: Path, there: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return the tensor to fill with a stored one: the existing tensor if its dtype and shape match, otherwise a new
    one, created as the optimizer itself would.
    """
    import torch

    dtype = spec.dtype.torch
    fits = isinstance(there, torch.Tensor) and there.dtype == dtype and tuple(there.shape) == spec.shape
    kept: torch.Tensor | None = there if fits else None
    if path[-1] == "step":  # on the device where Optimizer.load_state_dict puts it
        device = parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        if kept is not None and kept.device == device:
            return kept
        return torch.empty(spec.shape, dtype=dtype, device=device)
    if kept is not None:
        return kept
    if spec.shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    whole = torch.empty(spec.shape, dtype=dtype, device=parameter.device)
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or not spec.shape:
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    # as new_zeros of another shape than the DTensor's places it
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in _OWN}


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a parameter group."""
    import torch

    there = group.get(key)
    if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor) and there.shape == value.shape:
        there.copy_(value)  # schedulers and graphs refer to this tensor
    else:
        group[key] = value
