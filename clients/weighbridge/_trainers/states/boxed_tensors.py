"""Tensors of a trainer with the boxes that this rank holds of them, and the reasons why some tensors cannot be
stored.
"""

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
    """Tensors that are collected by name: DTensors of any mesh, parameters that ZeRO-3 has partitioned, and plain
    tensors. A rank that has a plain tensor holds it whole.

    Attributes:
        tensors: one tensor for each shard, with the shape of its box, which aliases the collected tensor.
        problems: one line for each tensor that cannot be stored.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.problems: list[str] = []
        self._taken: dict[str, torch.Tensor] = {}
        self._specs: list[TensorSpec] = []
        self._shards: list[Shard] = []

    def take(self, name: str, value: torch.Tensor, *, filled: bool = False) -> TensorSpec | None:
        """Add a tensor, and return its spec; None if it cannot be stored. A second tensor of the same name cannot be
        stored, unless it is the same tensor.

        ``filled`` tells whether the tensor will be filled from a stored one. Additional copies on this rank, such as
        those that ZeRO-3 makes of small parameters, are then filled too.
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
        """Add the boxes that this rank holds of a tensor, each with a tensor of its shape."""
        self._specs.append(spec)
        for box, tensor in held:
            self._shards.append(Shard(spec.name, box))
            self.tensors.append(tensor)

    @property
    def layout(self) -> Layout:
        """The shards as one stream. It also lists tensors of which this rank does not hold elements."""
        return Layout.stream(self._specs, self._shards)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    """Return name, dtype and global shape of a tensor.

    Raises:
        InvalidArgument: the tensor cannot be stored, because it is on the meta device or not dense.
    """
    import torch

    local = held_tensor(value)
    if local.is_meta:
        raise InvalidArgument("it is on the meta device and has no data")
    if type(local) is not torch.Tensor or local.layout != torch.strided:
        raise InvalidArgument(f"it is a {type(local).__name__} ({local.layout}), not a dense tensor")
    return TensorSpec(name, dtypes.from_torch(local.dtype), shape_of(value))


def taken_twice(name: str) -> str:
    """Return the text of the problem that two tensors have the same name."""
    return f"{name}: two tensors have this name, or names that differ only by wrappers; rename one of them"


def place(value: torch.Tensor) -> tuple[object, ...]:
    """Return the identity of a tensor's memory, which is the same for two names of one tensor. It uses the storage,
    because an empty tensor does not have an address.
    """
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
