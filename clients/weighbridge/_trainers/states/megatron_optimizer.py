"""Optimizers of Megatron-core on one rank: the parameters and elements for which they have state.

This module does not communicate. It reads the distributed optimizer by the ranges that the optimizer has given this
rank (``gbuf_ranges``), not by its ``sharded_state_dict``, which gathers. Source of the conventions:
``megatron.core.optimizer`` of 0.16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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
        parameter: the model's parameter.
        name: name in Megatron's checkpoints: ``exp_avg``, ``exp_avg_sq``; for a float32 copy ``fp32_param``, or
            ``param`` if the optimizer is the distributed one.
        flat: the state, as a tensor of one axis. It aliases the optimizer's tensor, or `RankOptimizer.put_back` copies
            it there.
        first: index of the first of its elements in the parameter.
    """

    parameter: torch.Tensor
    name: str
    flat: torch.Tensor
    first: int


class RankOptimizer(ABC):
    """A torch optimizer and Megatron's wrapper of it.

    Args:
        wrapped: Megatron's optimizer.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._inner = wrapped.optimizer

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        inner: torch.optim.Optimizer = self._inner
        return inner

    @property
    def grad_scaler(self) -> Any:
        """Megatron's gradient scaler; None if the optimizer does not have one."""
        return getattr(self._wrapped, "grad_scaler", None)

    @abstractmethod
    def _held(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Yield each parameter for which this rank has state: the model's parameter, the torch optimizer's tensor for
        it, and begin and end of the range in it.
        """

    @abstractmethod
    def _state_of(self, parameter: torch.Tensor, held: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of a parameter by the names in checkpoints, including values that are not elementwise
        tensors.
        """

    @abstractmethod
    def replica_id(self, of_parameter: Any) -> Any:
        """Return the ``replica_id`` of the state, given the parameter's."""

    @property
    @abstractmethod
    def replicas_alike(self) -> bool:
        """Whether ranks that hold replicas of a parameter hold state of the same elements."""

    @abstractmethod
    def put_back(self) -> None:
        """Copy filled tensors to the optimizer's tensors, if they do not alias them."""

    @property
    def kind(self) -> str:
        """The names of Megatron's and torch's classes."""
        return f"{type(self._wrapped).__name__} of {type(self._inner).__name__}"

    def parameters(self) -> list[torch.Tensor]:
        """Return the model's parameters for which this rank has state."""
        return [parameter for parameter, _, _, _ in self._held()]

    def states(self) -> Iterator[StateTensor]:
        """Yield all elementwise state.

        Raises:
            FailedPrecondition: the optimizer has not made a step, so it does not have state yet.
            LayoutError: a state is not elementwise.
        """
        for parameter, held, start, stop in self._held():
            if not self._inner.state.get(held):
                raise FailedPrecondition(
                    f"the {self.kind} has no state yet for a parameter {list(parameter.shape)}",
                    fix="push it after its first step",
                )
            for name, tensor in self._state_of(parameter, held).items():
                if name == _STEP:
                    continue
                if getattr(tensor, "numel", lambda: -1)() != stop - start or not tensor.is_contiguous():
                    raise LayoutError(
                        f"state {name} of a parameter {list(parameter.shape)} is not a dense "
                        f"tensor of its {stop - start} elements"
                    )
                yield StateTensor(parameter, name, tensor.detach().view(-1), start)

    def allocate(self) -> bool:
        """Allocate the state to fill, if the optimizer does not have state. Return whether it was allocated.

        Raises:
            InvalidArgument: Megatron cannot allocate the state, for example for SGD.
        """
        fresh = not self._inner.state
        if fresh and self._wrapped.init_state_fn is None:
            raise InvalidArgument(
                f"the {self.kind} has no state yet, and Megatron has no function that creates it",
                fix="run a step with it first",
            )
        if fresh:
            self._wrapped.init_state_fn(self._inner, self._wrapped.config)
        return fresh

    def drop(self) -> None:
        """Undo `allocate`: a state without a step count makes the next step fail."""
        self._inner.state.clear()


class _Plain(RankOptimizer):
    """An optimizer with state for whole parameters."""

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
        """See `RankOptimizer.put_back`. All state aliases the optimizer's tensors."""


class _Distributed(RankOptimizer):
    """The distributed optimizer. Each rank has a range of the elements of a model shard."""

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
        # it undoes the scaling of states of less than 32 bits, and returns copies in that case
        state: Mapping[str, Any] = self._wrapped._get_main_param_and_optimizer_states(parameter)
        self._given.append((parameter, state))
        return state

    def put_back(self) -> None:
        for parameter, state in self._given:
            self._wrapped._set_main_param_and_optimizer_states(parameter, state)

    def replica_id(self, of_parameter: Any) -> Any:
        # data-parallel ranks divide a shard among themselves, unless several instances of the optimizer hold it
        return (*of_parameter[:2], self._wrapped.distributed_optimizer_instance_id)


def rank_optimizers(optimizer: Any) -> list[RankOptimizer]:
    """Return the optimizers of one rank that have parameters to update, in Megatron's order.

    Args:
        optimizer: Megatron's optimizer, or None.

    Raises:
        InvalidArgument: the optimizer is not a Megatron-core optimizer, or its kind is not supported.
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
            (
                f"optimizer= is a {type(optimizer).__module__}.{type(optimizer).__qualname__}, not "
                "an optimizer of Megatron-core"
            ),
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
