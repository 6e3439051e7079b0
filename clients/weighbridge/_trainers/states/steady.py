"""Memory of a trainer that only the next step of an optimizer changes: the optimizer's parameters and its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from weighbridge._formats.dtensors import local_tensor
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Steady:
    """Memory that does not change until the next step of optimizers.

    Attributes:
        optimizers: the optimizers.
        storages: addresses of the storages that only these optimizers change.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    storages: frozenset[int]

    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same elements that does not change until then: the tensor itself, or a copy if other
        code may change it, for example a buffer.
        """
        return tensor if _storage(tensor) in self.storages else tensor.detach().clone()


def steady_until_step(optimizer: Any) -> Steady:
    """Memory that only the next step of an optimizer changes.

    Args:
        optimizer: one or several torch optimizers, or a Megatron-core optimizer.

    Raises:
        InvalidArgument: ``optimizer`` is something else.
    """
    import torch

    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if all(isinstance(each, torch.optim.Optimizer) for each in several) and several:
        return _steady(several, ())
    if not type(optimizer).__module__.startswith("megatron."):
        raise InvalidArgument(
            f"a {type(optimizer).__name__} is not an optimizer whose step a push can wait for",
            fix="pass an optimizer of torch, several of them, or one of Megatron-core",
        )
    from weighbridge._trainers.states.megatron_optimizer import rank_optimizers

    wrapped = rank_optimizers(optimizer)
    return _steady(
        [each.inner for each in wrapped],
        chain.from_iterable((*each.parameters(), *(state.flat for state in each.states())) for each in wrapped),
    )


def _steady(optimizers: Sequence[torch.optim.Optimizer], others: Iterable[torch.Tensor]) -> Steady:
    held = chain(others, *(_held(optimizer) for optimizer in optimizers))
    return Steady(tuple(optimizers), frozenset(_storage(local_tensor(tensor)) for tensor in held))


def _held(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of a torch optimizer, and the tensors of its state."""
    import torch

    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
