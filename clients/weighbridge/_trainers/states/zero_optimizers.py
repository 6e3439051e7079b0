"""State of DeepSpeed's ZeRO optimizers by the names of parameters, and back: stages 1, 2 and 3.

A rank's optimizer is a torch optimizer of flat tensors, in which ranges of parameters follow each other. The
optimizer's state for these elements, and the flat tensors themselves if they are float32 copies of the parameters, are
stored as boxes of whole tensors, so that any number of ranks can restore them. Names are as in `torch_optimizers`; the
copies are ``state.<parameter>.fp32_param``. Source of the conventions: ``deepspeed.runtime.zero.stage3`` and
``stage_1_and_2`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats import zero3
from weighbridge._formats.flat_ranges import StridedView, parts_of_range
from weighbridge._trainers.states.boxed_tensors import BoxedTensors
from weighbridge._trainers.states.torch_optimizers import (
    PARAMS,
    Groups,
    OptimizerFit,
    StatePart,
    kind_of,
    own_options,
)
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_STATE = "state."
_MASTER = "fp32_param"
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_STAGES_1_AND_2 = "DeepSpeedZeroOptimizer"


@dataclass(frozen=True)
class FlatRange:
    """Elements of a parameter in a flat tensor.

    Attributes:
        name: name of the parameter.
        shape: shape of the whole parameter.
        first: index of the range's first element in the parameter, in row-major order. Elements after the parameter's
            last one are padding.
        at: index of the range's first element in the flat tensor.
        size: number of elements.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    at: int
    size: int

    def boxes(self, flat: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Return the boxes of the parameter that form the range, each with a tensor of its shape that aliases
        ``flat``.
        """
        held = flat.detach()[self.at : self.at + self.size]
        return [
            (part.box, part.of(held)) for part in parts_of_range(self.first, self.size, StridedView.dense(self.shape))
        ]


@dataclass(frozen=True)
class Flat:
    """A flat tensor that the torch optimizer updates.

    Attributes:
        tensor: the tensor.
        group: number of its parameter group.
        ranges: the ranges of parameters in the flat tensor.
        copied: whether the flat tensor is a copy of the parameters and not the parameters themselves.
    """

    tensor: torch.Tensor
    group: int
    ranges: tuple[FlatRange, ...]
    copied: bool


class ZeroOptimizer:
    """One of DeepSpeed's ZeRO optimizers.

    Args:
        optimizer: ``engine.optimizer``.
        names: the module's names of its parameters.

    Raises:
        InvalidArgument: the kind of optimizer is not supported, or it keeps its state on NVMe.
        LayoutError: the optimizer has other parameters than the module.
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
                "the optimizer's state is offloaded to NVMe, or only in part",
                fix="offload all of it to the CPU, or none of it",
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

    def take_into(self, boxed: BoxedTensors, prefix: str) -> None:
        """Add the parts that this rank holds of all tensors of the state, with a prefix to their names, and problems
        for those that cannot be stored.
        """
        import torch

        for flat in self._flats:
            copy = {_MASTER: flat.tensor} if flat.copied else {}
            for key, value in {**self._state(flat), **copy}.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.dim() and value.shape != flat.tensor.shape:
                    boxed.problems.append(
                        f"{prefix}{_STATE}{flat.ranges[0].name}.{key}: it is neither a number "
                        "nor one value for each element of the parameters"
                    )
                    continue
                for each in flat.ranges:
                    name, dtype = f"{prefix}{_STATE}{each.name}.{key}", dtypes.from_torch(value.dtype)
                    if value.dim():
                        boxed.add(TensorSpec(name, dtype, each.shape), each.boxes(value))
                    else:
                        boxed.add(TensorSpec(name, dtype, ()), [(Box((), ()), value)])

    def values(self) -> dict[str, Any]:
        """Return the optimizer's state other than tensors: numbers by parameter, the parameter groups, and numbers of
        the loss scaler.
        """
        import torch

        numbers = {
            each.name: found
            for flat in self._flats
            for found in ({(key,): v for key, v in self._state(flat).items() if not isinstance(v, torch.Tensor)},)
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

    def fit(self, stored: Mapping[str, TensorSpec], values: Mapping[str, Any], *, strict: bool) -> OptimizerFit:
        """Fit the optimizer to a stored state. After the restore it has exactly the stored state.

        Args:
            stored: the stored tensors, by the names of `take_into`.
            values: result of `values`.
            strict: whether both must have the same parameters and the same kind of optimizer. If not, state that only
                one of them has is unchanged.
        """
        groups = Groups(values["param_groups"], values.get("kinds", ()))
        known = {each.name for flat in self._flats for each in flat.ranges}
        by_name: dict[str, dict[str, TensorSpec]] = {name: {} for name in known}
        fit = _ZeroFit([], owner=self, scale=values.get("loss_scaler", {}))
        for full, spec in stored.items():
            name, _, key = full.removeprefix(_STATE).rpartition(".")
            if name in by_name:
                by_name[name][key] = spec
            elif strict:
                fit.problems.append(f"the optimizer has no parameter for {spec}")
        if strict:
            fit.problems.extend(groups.unlike(known, known))
        kind = kind_of(self._inner) if strict else None
        for number, (members, group) in enumerate(zip(self._members(), self._inner.param_groups, strict=True)):
            groups.fit(fit, number, members, group, kind)
        for flat in self._flats:
            if strict or any(by_name[each.name] for each in flat.ranges):
                state = _fitted(fit, flat, self._state(flat), by_name)
                state |= values["state"].get(flat.ranges[0].name, {})
                fit.states.append((self._inner, flat.tensor, state))
        return fit

    def give(self, scale: Mapping[str, Any]) -> None:
        """Set the numbers of the loss scaler, and make DeepSpeed recompute the values that it derives from parameters
        and state.
        """
        scaler = self._scaler()
        # only the attributes that `values` returns, because the blob's writer chose the names
        for key in _numbers(scaler).keys() & scale.keys():
            setattr(scaler, key, scale[key])
        if hasattr(self._optimizer, "invalidate_secondary_tensor"):
            self._optimizer.invalidate_secondary_tensor()
        if hasattr(self._optimizer, "_hp_optimizer_states_linked") and self._inner.state:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _state(self, flat: Flat) -> Mapping[str, Any]:
        # uses get, because indexing a defaultdict creates an entry
        found: Mapping[str, Any] = self._inner.state.get(flat.tensor, {})
        return found

    def _members(self) -> list[list[str]]:
        """Return the names of the parameters of each group. This rank need not hold elements of them."""
        return [
            [each.name for flat in self._flats if flat.group == number for each in flat.ranges]
            for number in range(len(self._inner.param_groups))
        ]

    def _scaler(self) -> Any:
        return getattr(self._optimizer, "loss_scaler", None)


@dataclass(frozen=True)
class _ZeroFit(OptimizerFit):
    """A fit of a ZeRO optimizer, with the numbers of its loss scaler."""

    owner: ZeroOptimizer = field(kw_only=True)
    scale: Mapping[str, Any] = field(kw_only=True)

    def finish(self) -> None:
        """See `OptimizerFit.finish`."""
        super().finish()
        self.owner.give(self.scale)


def _fitted(
    fit: OptimizerFit, flat: Flat, there: Mapping[str, Any], stored: Mapping[str, Mapping[str, TensorSpec]]
) -> dict[tuple[str, ...], Any]:
    """Fit a flat tensor and its existing state to the stored tensors, by parameter and key.

    Return the state that it gets.
    """
    made: dict[tuple[str, ...], Any] = {}
    found = {each.name: stored[each.name] for each in flat.ranges}
    keys = dict.fromkeys(key for specs in found.values() for key in specs)
    if flat.copied:
        keys[_MASTER] = None
    for key in keys:
        lacking = [name for name, specs in found.items() if key not in specs]
        if lacking:
            fit.problems.extend(f"{_STATE}{name}.{key} is missing from the version" for name in lacking)
            continue
        of = [(each, found[each.name][key]) for each in flat.ranges]
        first = of[0][1]
        if key == _MASTER and (not flat.copied or first.dtype.torch != flat.tensor.dtype):
            fit.problems.append(f"{first} of the version is a master copy, and the optimizer has none of this dtype")
            continue
        scalar = key != _MASTER and not any(spec.shape for _, spec in of)
        shapes = [() if scalar else each.shape for each, _ in of]
        unlike = [
            f"{spec} of the version does not fit {each.name} {list(each.shape)}"
            for (each, spec), shape in zip(of, shapes, strict=True)
            if (spec.dtype, spec.shape) != (first.dtype, shape)
        ]
        if unlike:
            fit.problems.extend(unlike)
            continue
        into = flat.tensor
        if key != _MASTER:
            into = made[key,] = _target(flat.tensor, there.get(key), first, scalar=scalar)
        if scalar:  # the same for all parameters
            fit.parts.append(StatePart(first, [(Box((), ()), into)]))
        else:
            fit.parts.extend(StatePart(spec, each.boxes(into)) for each, spec in of)
    return made


def is_zero(optimizer: object) -> bool:
    """Whether this is one of DeepSpeed's own optimizers."""
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
            ranges.append(FlatRange(names[parameter], tuple(parameter.ds_shape), first, at, size))
            at += size
        of_parameters = optimizer.fp16_partitioned_groups_flat[index]
        copied = of_parameters is None or of_parameters.data_ptr() != tensor.data_ptr()
        yield Flat(tensor, optimizer.sub_group_to_group_id[index], tuple(ranges), copied)


def _stages_1_and_2(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Flat]:
    import torch.distributed as dist

    for index, tensor in enumerate(optimizer.single_partition_of_fp32_groups):
        begin = dist.get_rank(optimizer.real_dp_process_group[index]) * tensor.numel()
        members, offsets = (getattr(optimizer, f"round_robin_bit16_{each}")[index] for each in ("groups", "offsets"))
        ranges = []
        for parameter, offset in zip(members, offsets, strict=True):
            low = max(offset, begin)
            size = max(min(offset + parameter.numel(), begin + tensor.numel()) - low, 0)
            first, at = (low - offset, low - begin) if size else (0, 0)
            ranges.append(FlatRange(names[parameter], tuple(parameter.shape), first, at, size))
        yield Flat(tensor, index, tuple(ranges), copied=True)


def _target(flat: torch.Tensor, there: Any, spec: TensorSpec, *, scalar: bool) -> torch.Tensor:
    """Return the tensor to fill with a stored one: the existing one if it has the same form, otherwise a new one with
    zeros as padding.
    """
    import torch

    dtype, shape = spec.dtype.torch, () if scalar else tuple(flat.shape)
    if isinstance(there, torch.Tensor) and there.dtype == dtype and tuple(there.shape) == shape:
        return there
    return torch.zeros(shape, dtype=dtype, device="cpu" if scalar else flat.device)


def _numbers(scaler: Any) -> dict[str, Any]:
    return (
        {key: value for key, value in vars(scaler).items() if value is None or type(value) in (bool, int, float)}
        if hasattr(scaler, "__dict__")
        else {}
    )
