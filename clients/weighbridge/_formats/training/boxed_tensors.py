"""Tensors of a trainer with the boxes that this rank holds of them, and what keeps some from being kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats.dtensors import local_shards, local_tensor
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


class BoxedTensors:
    """Tensors that are collected by name: DTensors of any mesh, and plain ones, which every rank that has them holds whole.

    Attributes:
        tensors: one for each shard, of the extent of its box; they alias those that were given.
        problems: one line for each tensor that cannot be kept.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.problems: list[str] = []
        self._taken: dict[str, torch.Tensor] = {}
        self._specs: list[TensorSpec] = []
        self._shards: list[Shard] = []

    def take(self, name: str, value: torch.Tensor) -> TensorSpec | None:
        """Take one tensor; gives what it is, or None if it cannot be kept. A second one of that name cannot, unless it is the same."""
        try:
            spec = _spec(name, value)
            held = local_shards(value)
        except InvalidArgument as error:
            self.problems.append(f"{name}: {error.message}")
            return None
        known = self._taken.setdefault(name, value)
        if known is not value:
            if place(known) == place(value):
                return spec
            self.problems.append(taken_twice(name))
            return None
        self._specs.append(spec)
        self._shards += [Shard(name, box) for box, _ in held]
        self.tensors += [tensor for _, tensor in held]
        return spec

    @property
    def layout(self) -> Layout:
        """The shards as one stream. Tensors of which this rank holds no element are listed, too."""
        return Layout.stream(self._specs, self._shards)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    """Name, dtype and global shape of a tensor.

    Raises:
        InvalidArgument: its elements cannot be kept as they are.
    """
    import torch

    local = local_tensor(value)
    if local.is_meta:
        raise InvalidArgument("it is on the meta device, and without data")
    if type(local) is not torch.Tensor or local.layout != torch.strided:
        raise InvalidArgument(f"it is a {type(local).__name__} ({local.layout}), and no dense tensor")
    return TensorSpec(name, dtypes.from_torch(value.dtype), tuple(value.shape))


def taken_twice(name: str) -> str:
    """What is wrong with a name that two tensors have."""
    return f"{name}: two tensors have this name, or names that differ by wrappers alone; rename one of them"


def place(value: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's elements lie: the same for two names of one tensor. By the storage, for what is empty has no address."""
    import torch

    local = local_tensor(value)
    if local.layout != torch.strided:
        return (id(value),)
    return (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        local.stride(),
        value.dtype,
        tuple(value.shape),
    )
