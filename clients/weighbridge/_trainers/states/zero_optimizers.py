"""State of DeepSpeed's ZeRO optimizers by the names of parameters, and back: stages 1, 2 and 3.

A rank's optimizer is a torch optimizer of flat tensors, in which ranges of parameters lie one behind the other. What it keeps of their elements, and
the flat tensors themselves, where these are float32 copies of the parameters, are boxes of whole tensors, which fill any number of ranks. Names are as
in `torch_optimizers`; the copies are ``state.<parameter>.fp32_param``. Source of the conventions: ``deepspeed.runtime.zero.stage3`` and
``stage_1_and_2`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats import zero3
from weighbridge._formats.flat_ranges import StridedView, parts_of_range
from weighbridge._trainers.states.torch_optimizers import (
    PARAMS,
    Groups,
    kind_of,
    own_options,
    set_option,
)
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_STATE = "state."
_MASTER = "fp32_param"
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_STAGES_1_AND_2 = "DeepSpeedZeroOptimizer"


@dataclass(frozen=True)
class Range:
    """Elements of a parameter in a flat tensor.

    Attributes:
        name: the parameter's.
        shape: its whole shape.
        first: the first of its elements, in row-major order. Elements behind its last one are padding.
        at: where that lies in the flat tensor.
        size: how many there are.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    at: int
    size: int

    def boxes(self, flat: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of the parameter that they are, and for each a tensor of its extent that aliases a flat one."""
        held = flat.detach()[self.at : self.at + self.size]
        return [
            (part.box, part.of(held))
            for part in parts_of_range(self.first, self.size, StridedView.dense(self.shape))
        ]


@dataclass(frozen=True)
class Flat:
    """A flat tensor that the torch optimizer steps.

    Attributes:
        tensor: the tensor.
        group: number of its parameter group.
        ranges: what lies in it.
        copied: whether it is a copy of the parameters, and not these themselves.
    """

    tensor: torch.Tensor
    group: int
    ranges: tuple[Range, ...]
    copied: bool


@dataclass(frozen=True)
class Part:
    """Boxes of a tensor of the optimizer's state: what the tensor is, and each box with a tensor of its extent."""

    spec: TensorSpec
    held: Sequence[tuple[Box, torch.Tensor]]


@dataclass(frozen=True)
class ZeroFit:
    """How a ZeRO optimizer takes a stored state.

    Attributes:
        parts: what is to be filled.
        problems: one line for each thing that does not fit.
        finish: puts values into the optimizer.
    """

    parts: Sequence[Part]
    problems: Sequence[str]
    finish: Callable[[], None]


class ZeroOptimizer:
    """One of DeepSpeed's ZeRO optimizers.

    Args:
        optimizer: ``engine.optimizer``.
        names: the module's names of its parameters.

    Raises:
        InvalidArgument: it is of a kind that is not supported, or keeps its state on NVMe.
        LayoutError: it has other parameters than the module.
    """

    def __init__(self, optimizer: Any, names: Mapping[torch.Tensor, str]) -> None:
        kind = type(optimizer).__name__
        if kind not in (_STAGE_3, _STAGES_1_AND_2):
            raise InvalidArgument(
                f"the training state of DeepSpeed's {kind} is not supported",
                fix="use ZeRO stage 1, 2 or 3; in bf16 with gradients accumulated in bf16",
            )
        if getattr(optimizer, "swap_optimizer", False) or hasattr(optimizer, "backup_optimizer"):
            raise InvalidArgument(
                "the optimizer's state is offloaded to NVMe, or in parts",
                fix="offload all of it to the CPU, or nothing",
            )
        self._optimizer = optimizer
        self._inner: torch.optim.Optimizer = optimizer.optimizer
        find = _stage_3 if kind == _STAGE_3 else _stages_1_and_2
        try:
            self._flats = tuple(find(optimizer, names))
        except KeyError:
            raise LayoutError(
                "the optimizer has parameters that the module does not have",
                fix="give engine.module, or the engine, with engine.optimizer",
            ) from None

    def problems(self) -> list[str]:
        """One line for each thing of its state that cannot be kept."""
        import torch

        return [
            f"{_STATE}{flat.ranges[0].name}.{key}: it is neither of the parameters' elements nor a number"
            for flat in self._flats
            for key, value in self._state(flat).items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != flat.tensor.shape
        ]

    def parts(self) -> Iterator[tuple[str, Part]]:
        """All tensors of its state, by name, with what this rank holds of each."""
        import torch

        for flat in self._flats:
            state = dict(self._state(flat))
            if flat.copied:
                state[_MASTER] = flat.tensor
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                for each in flat.ranges:
                    name, dtype = f"{_STATE}{each.name}.{key}", dtypes.from_torch(value.dtype)
                    if value.dim():
                        yield name, Part(TensorSpec(name, dtype, each.shape), each.boxes(value))
                    else:
                        yield name, Part(TensorSpec(name, dtype, ()), [(Box((), ()), value)])

    def values(self) -> dict[str, Any]:
        """What is no tensor: numbers by parameter, the parameter groups, and the loss scaler's."""
        import torch

        numbers = {
            each.name: found
            for flat in self._flats
            for found in (
                {(key,): v for key, v in self._state(flat).items() if not isinstance(v, torch.Tensor)},
            )
            if found
            for each in flat.ranges
        }
        groups = [
            {PARAMS: members} | own_options(group)
            for members, group in zip(self._members(), self._inner.param_groups, strict=True)
        ]
        kinds = [kind_of(self._inner)] * len(groups)
        scaler = _numbers(self._scaler())
        return {"state": numbers, "param_groups": groups, "kinds": kinds, "loss_scaler": scaler}

    def fit(self, stored: Mapping[str, TensorSpec], values: Mapping[str, Any], *, strict: bool) -> ZeroFit:
        """Find where a stored state goes. Afterwards the optimizer has just what is stored.

        Args:
            stored: its tensors, as `parts` has named them.
            values: what `values` gave.
            strict: whether both must have the same parameters, of the same kind of optimizer. If not, what only one of them has stays as it is.
        """
        groups = Groups(values["param_groups"], values.get("kinds", ()))
        known = {each.name for flat in self._flats for each in flat.ranges}
        by_name: dict[str, dict[str, TensorSpec]] = {name: {} for name in known}
        problems = []
        for full, spec in stored.items():
            name, _, key = full.removeprefix(_STATE).rpartition(".")
            if name in by_name:
                by_name[name][key] = spec
            elif strict:
                problems.append(f"the optimizer has no parameter for {spec}")
        if strict:
            problems += groups.unlike(known, known)
        options = []
        for number, (members, group) in enumerate(
            zip(self._members(), self._inner.param_groups, strict=True)
        ):
            found, problem = groups.of(members)
            if problem:
                problems.append(f"group {number} of the optimizer {problem}")
            unlike = groups.of_another_kind(members, kind_of(self._inner)) if strict else ""
            if unlike:
                problems.append(f"group {number} of the optimizer {unlike}")
            options.append((group, found))
        fitted = [
            _fitted(flat, self._state(flat), by_name)
            for flat in self._flats
            if strict or any(by_name[each.name] for each in flat.ranges)
        ]
        for each in fitted:
            problems += each.problems
            each.state.update(
                {key: value for (key,), value in values["state"].get(each.flat.ranges[0].name, {}).items()}
            )

        def finish() -> None:
            for each in fitted:
                if each.state:
                    self._inner.state[each.flat.tensor] = each.state
                else:
                    self._inner.state.pop(each.flat.tensor, None)
            for group, found in options:
                for key, value in own_options(found).items():
                    set_option(group, key, value)
            scaler = self._scaler()
            # no attribute but those that `values` gives: whoever has written the blob names them
            for key in _numbers(scaler).keys() & values.get("loss_scaler", {}).keys():
                setattr(scaler, key, values["loss_scaler"][key])
            self._tell()

        return ZeroFit([part for each in fitted for part in each.parts], problems, finish)

    def _state(self, flat: Flat) -> Mapping[str, Any]:
        # by get: asking a defaultdict makes an entry
        found: Mapping[str, Any] = self._inner.state.get(flat.tensor, {})
        return found

    def _members(self) -> list[list[str]]:
        """Names of the parameters of each group, of which this rank may hold no element."""
        return [
            [each.name for flat in self._flats if flat.group == number for each in flat.ranges]
            for number in range(len(self._inner.param_groups))
        ]

    def _tell(self) -> None:
        """Let DeepSpeed drop what it derives from parameters and state, and find these anew."""
        if hasattr(self._optimizer, "invalidate_secondary_tensor"):
            self._optimizer.invalidate_secondary_tensor()
        if hasattr(self._optimizer, "_hp_optimizer_states_linked") and self._inner.state:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _scaler(self) -> Any:
        return getattr(self._optimizer, "loss_scaler", None)


@dataclass(frozen=True)
class _Fitted:
    """What a flat tensor takes: state of the torch optimizer, parts of it to be filled, and what does not fit."""

    flat: Flat
    state: dict[str, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _fitted(flat: Flat, there: Mapping[str, Any], stored: Mapping[str, Mapping[str, TensorSpec]]) -> _Fitted:
    """Fit a flat tensor and the state that is there of it to what is stored, by parameter and key."""
    made = _Fitted(flat)
    found = {each.name: stored[each.name] for each in flat.ranges}
    keys = dict.fromkeys(key for specs in found.values() for key in specs)
    if flat.copied:
        keys[_MASTER] = None
    for key in keys:
        lacking = [name for name, specs in found.items() if key not in specs]
        if lacking:
            made.problems.extend(f"{_STATE}{name}.{key} is missing from the version" for name in lacking)
            continue
        of = [(each, found[each.name][key]) for each in flat.ranges]
        first = of[0][1]
        if key == _MASTER and (not flat.copied or first.dtype.torch != flat.tensor.dtype):
            made.problems.append(f"{first} of the version is a copy such as the optimizer has none of")
            continue
        scalar = key != _MASTER and not any(spec.shape for _, spec in of)
        shapes = [() if scalar else each.shape for each, _ in of]
        unlike = [
            f"{spec} of the version does not fit {each.name} {list(each.shape)}"
            for (each, spec), shape in zip(of, shapes, strict=True)
            if (spec.dtype, spec.shape) != (first.dtype, shape)
        ]
        if unlike:
            made.problems.extend(unlike)
            continue
        into = flat.tensor
        if key != _MASTER:
            into = made.state[key] = _target(flat.tensor, there.get(key), first, scalar=scalar)
        if scalar:  # the same for all parameters
            made.parts.append(Part(first, [(Box((), ()), into)]))
        else:
            made.parts.extend(Part(spec, each.boxes(into)) for each, spec in of)
    return made


def is_zero(optimizer: object) -> bool:
    """Whether this is an optimizer of DeepSpeed's own."""
    api = sys.modules.get("deepspeed.runtime.base_optimizer")
    return api is not None and isinstance(optimizer, api.DeepSpeedOptimizer)


def _stage_3(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Flat]:
    for index, (members, tensor) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        ranges, at = [], 0
        for parameter in members:
            size = parameter.ds_tensor.ds_numel
            first = zero3.partition_rank(parameter) * size
            ranges.append(Range(names[parameter], tuple(parameter.ds_shape), first, at, size))
            at += size
        of_parameters = optimizer.fp16_partitioned_groups_flat[index]
        copied = of_parameters is None or of_parameters.data_ptr() != tensor.data_ptr()
        yield Flat(tensor, optimizer.sub_group_to_group_id[index], tuple(ranges), copied)


def _stages_1_and_2(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Flat]:
    import torch.distributed as dist

    for index, tensor in enumerate(optimizer.single_partition_of_fp32_groups):
        begin = dist.get_rank(optimizer.real_dp_process_group[index]) * tensor.numel()
        members, offsets = (
            getattr(optimizer, f"round_robin_bit16_{each}")[index] for each in ("groups", "offsets")
        )
        ranges = []
        for parameter, offset in zip(members, offsets, strict=True):
            low = max(offset, begin)
            size = max(min(offset + parameter.numel(), begin + tensor.numel()) - low, 0)
            first, at = (low - offset, low - begin) if size else (0, 0)
            ranges.append(Range(names[parameter], tuple(parameter.shape), first, at, size))
        yield Flat(tensor, index, tuple(ranges), copied=True)


def _target(flat: torch.Tensor, there: Any, spec: TensorSpec, *, scalar: bool) -> torch.Tensor:
    """The tensor that takes a stored one: what is there if it is alike, or else a new one, zero where there is padding."""
    import torch

    dtype, shape = spec.dtype.torch, () if scalar else tuple(flat.shape)
    if isinstance(there, torch.Tensor) and there.dtype == dtype and tuple(there.shape) == shape:
        return there
    return torch.zeros(shape, dtype=dtype, device="cpu" if scalar else flat.device)


def _numbers(scaler: Any) -> dict[str, Any]:
    return (
        {
            key: value
            for key, value in vars(scaler).items()
            if value is None or type(value) in (bool, int, float)
        }
        if hasattr(scaler, "__dict__")
        else {}
    )
