"""Filling of a torch model by a pull: the slice for each of its tensors.

All tensors are checked before any is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from weighbridge._clients.calls.pull_calls import PullPlan
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.resources import Version
from weighbridge._core.slices import Boxes
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size
from weighbridge._formats.tensor_stream import written_as
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["Filled"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class Filled:
    """Result of filling a model by a pull.

    Attributes:
        version: the version that was pulled.
        tensors: names of the pulled tensors that this rank holds.
        nbytes: bytes that were pulled.
        cast: names of tensors that were cast to another floating-point dtype.
        missing: names in the target that the pull does not contain. A tensor that shares memory with a pulled one is
            not missing.
        unexpected: names in the pull that the target does not have.
    """

    version: Version
    tensors: tuple[str, ...]
    nbytes: int
    cast: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __repr__(self) -> str:
        others = {"cast": self.cast, "missing": self.missing, "unexpected": self.unexpected}
        counts = "".join(f", {len(names)} {what}" for what, names in others.items() if names)
        what = f"{counted(len(self.tensors), 'tensor')}, {readable_size(self.nbytes)}{counts}"
        return f"<Filled from {self.version.model}@{self.version.number}: {what}>"


@dataclass(frozen=True)
class Fill:
    """A fill that fits the target.

    Attributes:
        boxes: boxes to pull instead of the planned slices; None if the planned slices are pulled.
        tensors: one tensor for each placement that is pulled, with the shape of its box.
        report: result of the fill if it succeeds.
    """

    boxes: Boxes | None
    tensors: tuple[torch.Tensor, ...]
    report: Filled


def fit(
    plan: PullPlan,
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    cast: str,
    strict: bool,
    adapter: Mapping[str, torch.Tensor] | None = None,
) -> Fill:
    """Find the tensors of a model that a pull fills; see `Pull.into`. If the pull fills an adapter of the model,
    ``adapter`` contains the adapter's tensors.

    Raises:
        InvalidArgument: ``target`` is neither a module nor a state dict, or ``cast`` is unknown.
        LayoutError: names, shapes, dtypes or placements do not fit (names each tensor).
    """
    import torch

    from weighbridge._formats.torch_state import adapter_targets, check_not_copied, torch_shards

    offsets: dict[str, tuple[int, ...]] = {}
    slices: dict[str, TensorSpec] = {}
    for shard, _, _, _ in plan.layout.placements:
        if shard.tensor in slices:
            raise LayoutError(
                f"{shard.tensor} comes in several boxes, and a state dict has one tensor for it",
                fix="fill tensors of your own for each box: pull.filled(tensor_for)",
            )
        offsets[shard.tensor] = shard.box.offset
        spec = plan.layout.tensors[shard.tensor]
        slices[shard.tensor] = TensorSpec(shard.tensor, spec.dtype, shard.box.extent)
    version = f"{plan.version.model}@{plan.version.number}"
    held = (
        torch_shards(target, slices, cast=cast, whole=strict, others=not strict, filled=True, of=version)
        if adapter is None
        else adapter_targets(adapter, slices, cast=cast, strict=strict, of=version)
    )
    if isinstance(target, torch.nn.Module):
        check_not_copied(target, held.layout, held.tensors)
    by_name = {
        placement.shard.tensor: tensor
        for placement, tensor in zip(held.layout.placements, held.tensors, strict=True)
        if placement.shard.box == Box.whole(slices[placement.shard.tensor].shape)
    }
    as_planned = len(held.tensors) == len(by_name) == len(slices)
    return Fill(
        None if as_planned else Boxes(_shifted(held.layout, offsets)),
        tuple(by_name[name] for name in slices) if as_planned else held.tensors,
        Filled(
            version=plan.version,
            tensors=tuple(held.layout.tensors),
            nbytes=held.layout.nbytes,
            cast=held.cast,
            missing=held.unknown,
            unexpected=held.absent,
        ),
    )


def _shifted(layout: Layout, offsets: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int], Sequence[int]]]:
    """Convert boxes of slices to boxes of the whole tensors."""
    return [
        (
            shard.tensor,
            tuple(a + b for a, b in zip(offsets[shard.tensor], shard.box.offset, strict=True)),
            shard.box.extent,
        )
        for shard, _, _, _ in layout.placements
    ]


def fill_tensors(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    filled: Callable[[Callable[[int], torch.Tensor]], Iterable[T]],
    device: str | None = None,
) -> Iterator[T]:
    """Pull slices into tensors. If a tensor has another floating-point dtype, its slice is pulled into a temporary
    tensor of the slice's dtype and then cast.

    Args:
        layout: layout of the slices.
        tensors: one tensor for each placement, on any device.
        filled: pulls into the tensors that it receives, in the order of placements.
        device: device of the temporary tensors; None for the device of the target tensor.

    Yields:
        The result of ``filled`` for each placement, once its tensor is filled.
    """
    import torch

    to_cast: dict[int, torch.Tensor] = {}

    def tensor_for(index: int) -> torch.Tensor:
        tensor = tensors[index]
        dtype = written_as(layout.tensors[layout.placements[index].shard.tensor], tensor)
        if dtype == tensor.dtype:
            return tensor
        made = to_cast[index] = torch.empty_like(tensor, dtype=dtype, device=device)
        return made

    for index, each in enumerate(filled(tensor_for)):
        if index in to_cast:
            tensors[index].copy_(to_cast.pop(index))
        yield each
