"""Optimizers of Megatron-core on one rank: which elements of which parameters they keep state of, and their other values.

Nothing here communicates. The distributed optimizer is read by the ranges that it has given this rank (``gbuf_ranges``), not by its
``sharded_state_dict``, which gathers. Source of the conventions: ``megatron.core.optimizer`` of 0.16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_STEP = "step"
_ADVICE = "pass what megatron.core.optimizer.get_megatron_optimizer returned"


class StateTensor(NamedTuple):
    """One tensor of the state of a parameter, or of a range of its elements.

    Attributes:
        parameter: the model's.
        name: as Megatron's checkpoints have it: ``exp_avg``, ``exp_avg_sq``; of a copy in float32 ``fp32_param``, or ``param`` if the
            optimizer is the distributed one.
        flat: the state, of one axis; it aliases what the optimizer holds, or is brought there by `RankOptimizer.put_back`.
        first: index of the parameter's element that it begins with.
    """

    parameter: torch.Tensor
    name: str
    flat: torch.Tensor
    first: int


class RankOptimizer(ABC):
    """One torch optimizer, and what Megatron has put around it.

    Args:
        wrapped: Megatron's.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._inner = wrapped.optimizer

    @abstractmethod
    def _held(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Each parameter of which this rank has state: the model's, what the torch optimizer has for it, and from where to where in it."""

    @abstractmethod
    def _state_of(self, parameter: torch.Tensor, held: torch.Tensor) -> Mapping[str, Any]:
        """The state of a parameter by the names that checkpoints have, what is no tensor of its elements included."""

    @abstractmethod
    def replica_id(self, of_parameter: Any) -> Any:
        """The ``replica_id`` of the state, given the parameter's."""

    @property
    @abstractmethod
    def replicas_alike(self) -> bool:
        """Whether ranks that hold replicas of a parameter hold state of the same elements."""

    @abstractmethod
    def put_back(self) -> None:
        """Bring what was filled in to where it belongs, if it does not alias that."""

    @property
    def kind(self) -> str:
        """Names of Megatron's class and of torch's."""
        return f"{type(self._wrapped).__name__} of {type(self._inner).__name__}"

    def parameters(self) -> list[torch.Tensor]:
        """The model's parameters of which this rank has state."""
        return [parameter for parameter, _, _, _ in self._held()]

    def states(self) -> Iterator[StateTensor]:
        """All that it keeps by elements.

        Raises:
            FailedPrecondition: it has made no step, so there is none yet.
            LayoutError: a state is not one of elements.
        """
        for parameter, held, start, stop in self._held():
            if not self._inner.state.get(held):
                raise FailedPrecondition(
                    f"the {self.kind} has no state yet of a parameter {list(parameter.shape)}",
                    fix="push it after its first step",
                )
            for name, tensor in self._state_of(parameter, held).items():
                if name == _STEP:
                    continue
                if getattr(tensor, "numel", lambda: -1)() != stop - start or not tensor.is_contiguous():
                    raise LayoutError(
                        f"state {name} of a parameter {list(parameter.shape)} is no dense tensor of its {stop - start} elements"
                    )
                yield StateTensor(parameter, name, tensor.detach().view(-1), start)

    def allocate(self) -> bool:
        """Make the state that is to be filled, if there is none. Whether there was none.

        Raises:
            InvalidArgument: Megatron has no way to make it, as of SGD.
        """
        fresh = not self._inner.state
        if fresh and self._wrapped.init_state_fn is None:
            raise InvalidArgument(
                f"the {self.kind} has no state yet, and Megatron does not say how to make it",
                fix="make a step with it first",
            )
        if fresh:
            self._wrapped.init_state_fn(self._inner, self._wrapped.config)
        return fresh

    def drop(self) -> None:
        """Undo `allocate`: a state without a step count makes the next step fail."""
        self._inner.state.clear()

    def values(self) -> dict[str, Any]:
        """What it keeps besides: groups of parameters without these, the count of steps, the scale of gradients.

        Raises:
            FailedPrecondition: steps of parameters differ.
        """
        steps = {float(state[_STEP]) for state in self._inner.state.values() if _STEP in state}
        if len(steps) > 1:
            raise FailedPrecondition(
                f"parameters of the {self.kind} have made different numbers of steps: {sorted(steps)[:8]}"
            )
        scaler = getattr(self._wrapped, "grad_scaler", None)
        return {
            "kind": self.kind,
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._inner.param_groups
            ],
            _STEP: next(iter(steps), None),
            "grad_scaler": scaler.state_dict() if scaler else None,
        }

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse values that are not of such an optimizer.

        Raises:
            LayoutError: it is of another kind, or has other groups of parameters.
        """
        if values["kind"] != self.kind:
            raise LayoutError(
                f"the state is that of a {values['kind']}, and the optimizer is a {self.kind}",
                fix="build the optimizer by the settings that the state was pushed with",
            )
        self._matched(values["param_groups"])

    def take(self, values: Mapping[str, Any]) -> None:
        """Set what `values` has given."""
        import torch

        for group, kept in zip(self._inner.param_groups, self._matched(values["param_groups"]), strict=True):
            group.update(kept)
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"] if values[_STEP] is not None else ():
                device = parameter.device if on_device else None
                self._inner.state[parameter][_STEP] = torch.tensor(
                    values[_STEP], dtype=torch.float32, device=device
                )
        if values["grad_scaler"] and self._wrapped.grad_scaler:
            self._wrapped.grad_scaler.load_state_dict(values["grad_scaler"])

    def _matched(self, kept: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """For each of its groups the one that was kept of it: by what Megatron tells groups by, if their order is not the same."""
        own = [_identity(group) for group in self._inner.param_groups]
        there = [_identity(group) for group in kept]
        if own == there:
            return list(kept)
        by_identity = dict(zip(there, kept, strict=True))
        missing = [each for each in own if each not in by_identity]
        if missing:
            raise LayoutError(
                f"{len(missing)} groups of parameters of the {self.kind} are not in the state",
                details=[", ".join(f"{name}={value}" for name, value in each) for each in missing],
                fix="build the optimizer by the settings that the state was pushed with",
            )
        return [by_identity[each] for each in own]


class _Plain(RankOptimizer):
    """An optimizer that has the state of whole parameters."""

    replicas_alike = True

    def _held(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        for parameter, held in self._pairs():
            yield parameter, held, 0, parameter.numel()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        halves = getattr(self._wrapped, "float16_groups", None)
        if halves is None:
            own = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        else:
            yield from zip(
                chain.from_iterable(halves),
                chain.from_iterable(self._wrapped.fp32_from_float16_groups),
                strict=True,
            )
            own = list(chain.from_iterable(self._wrapped.fp32_from_fp32_groups))
        yield from zip(own, own, strict=True)

    def _state_of(self, parameter: torch.Tensor, held: torch.Tensor) -> Mapping[str, Any]:
        copy = {} if held is parameter else {"fp32_param": held}
        return {**copy, **self._inner.state[held]}

    def replica_id(self, of_parameter: Any) -> Any:
        return of_parameter

    def put_back(self) -> None:
        """See `RankOptimizer.put_back`. All of it aliases the optimizer's tensors."""


class _Distributed(RankOptimizer):
    """The distributed optimizer: of each model shard, ranks have ranges of the elements."""

    replicas_alike = False

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        self._given: list[tuple[torch.Tensor, Mapping[str, Any]]] = []

    def _held(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        for of_buffer in self._wrapped.gbuf_ranges:
            for buckets in of_buffer.values():
                for bucket in buckets:
                    for parameter, where in bucket["param_map"].items():
                        group, order = self._wrapped.model_param_group_index_map[parameter]
                        held = self._inner.param_groups[group]["params"][order]
                        yield parameter, held, where["param"].start, where["param"].end

    def _state_of(self, parameter: torch.Tensor, held: torch.Tensor) -> Mapping[str, Any]:
        # it undoes what states of less than 32 bits are scaled by, and then gives copies
        state: Mapping[str, Any] = self._wrapped._get_main_param_and_optimizer_states(parameter)
        self._given.append((parameter, state))
        return state

    def put_back(self) -> None:
        for parameter, state in self._given:
            self._wrapped._set_main_param_and_optimizer_states(parameter, state)

    def replica_id(self, of_parameter: Any) -> Any:
        # ranks of data parallelism share a shard out, unless several instances of the optimizer hold it
        return (*of_parameter[:2], self._wrapped.distributed_optimizer_instance_id)


def rank_optimizers(optimizer: Any) -> list[RankOptimizer]:
    """The optimizers of one rank that have parameters to update, in Megatron's order.

    Args:
        optimizer: Megatron's; None if there is none.

    Raises:
        InvalidArgument: it is none of Megatron-core's, or one whose state is not held as those here hold it.
    """
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if optimizer is None:
        return []
    if type(optimizer) is ChainedOptimizer:
        return [each for one in optimizer.chained_optimizers for each in rank_optimizers(one)]
    if not isinstance(optimizer, MegatronOptimizer):
        raise InvalidArgument(
            f"optimizer= is a {type(optimizer).__module__}.{type(optimizer).__qualname__}, and none of Megatron-core's",
            fix=_ADVICE,
        )
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if isinstance(getattr(optimizer, "optimizer", None), HybridDeviceOptimizer):
        raise InvalidArgument("an optimizer with optimizer_cpu_offload is not supported")
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.ddp_config.use_megatron_fsdp:
            raise InvalidArgument("a DistributedOptimizer of Megatron-FSDP is not supported")
        return [_Distributed(optimizer)]
    if isinstance(optimizer, FP32Optimizer | Float16OptimizerWithFloat16Params):
        return [_Plain(optimizer)]
    raise InvalidArgument(f"a {type(optimizer).__name__} is not supported", fix=_ADVICE)


def values_of(optimizers: Sequence[RankOptimizer]) -> list[dict[str, Any]]:
    """What the optimizers of a rank keep besides tensors.

    All have made the same steps; one without parameters on this rank does not count them, and is told by the others.
    """
    found = [optimizer.values() for optimizer in optimizers]
    groups = [group for values in found for group in values["param_groups"]]
    counts = [values[_STEP] for values in found if values[_STEP] is not None]
    of_groups = [group[_STEP] for group in groups if _STEP in group]
    for values in found:
        if counts and values[_STEP] is None:
            values[_STEP] = counts[0]
    for group in groups if of_groups else ():
        group.setdefault(_STEP, of_groups[0])
    return found


def check_values(optimizers: Sequence[RankOptimizer], kept: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what `values_of` other optimizers has given.

    Raises:
        LayoutError: they are of another number or kind.
    """
    if len(optimizers) != len(kept):
        own, there = ([each.kind for each in optimizers], [each["kind"] for each in kept])
        raise LayoutError(
            f"the state is that of {len(kept)} optimizers of Megatron's ({', '.join(there)}), and there are {len(own)} ({', '.join(own)})",
            fix="build model and optimizer by the settings that the state was pushed with",
        )
    for optimizer, values in zip(optimizers, kept, strict=True):
        optimizer.check(values)


def _identity(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What Megatron tells groups of parameters by; NeMo has other names for some of it."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys as names

    return tuple((name, group.get(name, group.get(f"pre_{name}"))) for name in names)
