"""Tensors of a trainer with the boxes that this rank holds of them, and what keeps some from being kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats import zero3
from weighbridge._formats.torch_state import held_tensor, shape_of, shards_of
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


class BoxedTensors:
    """Tensors that are collected by name: DTensors of any mesh, parameters that ZeRO-3 has partitioned, and plain tensors, which every rank
    that has them holds whole.

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

    def take(self, name: str, value: torch.Tensor, *, filled: bool = False) -> TensorSpec | None:
        """Take one tensor; gives what it is, or None if it cannot be kept. A second one of that name cannot, unless it is the same.

        ``filled`` is whether it takes what is stored. Copies that this rank holds besides, as ZeRO-3 keeps them of small parameters, do so, too.
        """
        try:
            spec = _spec(name, value)
            held = shards_of(value)
        except InvalidArgument as error:
            self.problems.append(f"{name}: {error.message}")
            return None
        known = self._taken.setdefault(name, value)
        if known is not value:
            if place(known) == place(value):
                return spec
            self.problems.append(taken_twice(name))
            return None
        copy = zero3.gathered_copy(value) if filled and zero3.is_partitioned(value) else None
        self.add(spec, held if copy is None else [*held, (Box.whole(spec.shape), copy)])
        return spec

    def add(self, spec: TensorSpec, held: Iterable[tuple[Box, torch.Tensor]]) -> None:
        """Take what this rank holds of a tensor: boxes of it, each with a tensor of its extent."""
        self._specs.append(spec)
        for box, tensor in held:
            self._shards.append(Shard(spec.name, box))
            self.tensors.append(tensor)

    @property
    def layout(self) -> Layout:
        """The shards as one stream. Tensors of which this rank holds no element are listed, too."""
        return Layout.stream(self._specs, self._shards)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    """Name, dtype and global shape of a tensor.

    Raises:
        InvalidArgument: the tensor cannot be kept, because it is on the meta device or not dense.
    """
    import torch

    local = held_tensor(value)
    if local.is_meta:
        raise InvalidArgument("it is on the meta device, and without data")
    if type(local) is not torch.Tensor or local.layout != torch.strided:
        raise InvalidArgument(f"it is a {type(local).__name__} ({local.layout}), and no dense tensor")
    return TensorSpec(name, dtypes.from_torch(local.dtype), shape_of(value))


def taken_twice(name: str) -> str:
    """Problem of a name that two tensors have, as a text."""
    return f"{name}: two tensors have this name, or names that differ by wrappers alone; rename one of them"


def place(value: torch.Tensor) -> tuple[object, ...]:
    """Identity of a tensor's memory, the same for two names of one tensor. It uses the storage, because an empty tensor has no address."""
    import torch

    local = held_tensor(value)
    if local.layout != torch.strided:
        return (id(value),)
    return (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        local.stride(),
        local.dtype,
        shape_of(value),
    )
