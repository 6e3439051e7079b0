"""Rules by which Hugging Face tensors follow from a Megatron-core tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class Rearrangement(Protocol):
    """How one whole Megatron-core tensor becomes Hugging Face tensors.

    It is never run on weights: once on shapes, and a few times on tensors of element numbers, to find out which element
    goes where. It may only place elements. One that scales, shifts or mixes them is found out and refused; a constant that is added to
    all of them is the rule's `shift`.
    """

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""


@dataclass(frozen=True)
class Section:
    """Rows of a Megatron-core tensor that are a tensor of their own in distributed checkpoints, as ``z`` of ``in_proj.weight.z``.

    Attributes:
        name: what is behind the name of the whole.
        rows: how many.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class Rule:
    """Tensors of one kind: all layers and experts whose tensors are made in the same way.

    In names, ``{layer}`` and ``{expert}`` stand for numbers; ``{layer+61}`` is one that begins elsewhere.

    Attributes:
        megatron: Megatron-core's name, as its distributed checkpoints spell it with a key for each layer and expert,
            by the Transformer Engine layer spec: ``decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight``.
        hugging_face: the tensors that it becomes. ``name[{expert}]`` is one index of the first axis of a tensor that
            Hugging Face stacks.
        conversion: how.
        copies: further tensors that hold the same elements as the first one. They are written on the way to Hugging
            Face, and not read on the way back.
        part_of_copies: the optional part that the copies belong to.
        vocabulary: whether the first axis is the vocabulary, which trainers may pad.
        halves: whether the Megatron-core tensor is two halves above each other (all gate rows, then all up rows), of which
            tensor parallelism cuts each by itself.
        sections: parts above each other that Megatron-core declares by themselves, and of which tensor parallelism cuts each by itself;
            together all rows of the tensor. Empty if it declares the tensor whole.
        by_heads: whether the first axis has as many elements of each head, and tensor parallelism cuts it although tensors of that
            name are whole elsewhere, such as a norm over all heads together.
        every: how many rows of Hugging Face's tensors, along their last axis, take turns, such as those of gate and up; the
            conversion then has that axis as two, the latter of this length.
        shift: what is added to each element on the way to Hugging Face, and subtracted on the way back, such as one for a norm whose
            weights Megatron-core has less one. A finite float32; the tensors are of floating-point numbers of 16 bits or more, and no vocabulary. Others are refused.
        part: name of an optional part of the model, such as ``mtp``, that a checkpoint has whole or not at all; empty
            if the tensor belongs to every checkpoint.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    conversion: Rearrangement
    copies: tuple[str, ...] = ()
    part_of_copies: str = ""
    vocabulary: bool = False
    halves: bool = False
    sections: tuple[Section, ...] = ()
    by_heads: bool = False
    every: int = 1
    shift: float = 0.0
    part: str = ""

    def seen(self, shape: Shape) -> Shape:
        """The shape of a Hugging Face tensor with the axes that the conversion has."""
        return shape if self.every == 1 else (*shape[:-1], shape[-1] // self.every, self.every)


class _Whole:
    """One tensor, the same on both sides."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tensor]


WHOLE: Rearrangement = _Whole()
"""One tensor, the same on both sides."""


@dataclass(frozen=True)
class Halves:
    """Two tensors of one shape above each other, such as all gate rows and then all up rows.

    Attributes:
        axis: of the Megatron-core tensor that the halves share.
    """

    axis: int = 0

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        shape = list(shapes[0])
        shape[self.axis] *= 2
        return tuple(shape)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        return tensor.chunk(2, dim=self.axis)


@dataclass(frozen=True)
class Swapped:
    """The two halves of an axis in the other order.

    Attributes:
        axis: the axis.
    """

    axis: int = 0

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return shapes[0]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        import torch

        first, second = tensor.chunk(2, dim=self.axis)
        return [torch.cat([second, first], dim=self.axis)]


@dataclass(frozen=True)
class Transposed:
    """One matrix, with rows and columns exchanged."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        rows, columns = shapes[0]
        return (columns, rows)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        return [tensor.t()]


@dataclass(frozen=True)
class OneRow:
    """A vector, which Hugging Face has as a matrix of one row."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return shapes[0][1:]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        return [tensor[None]]


@dataclass(frozen=True)
class Alternating:
    """Two halves above each other that alternate along Hugging Face's last axis, the other axes in reverse order.

    For rules with ``every=2``.
    """

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        *others, length, count = shapes[0]
        return (count * length, *reversed(others))

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        halves = tensor.reshape(2, tensor.shape[0] // 2, *tensor.shape[1:])
        return [halves.permute(*reversed(range(halves.dim())))]


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value projections, which Megatron-core interleaves by key-value head.

    Attributes:
        heads: attention heads.
        kv_heads: key-value heads.
        gated: whether the query projection makes a gate for each head besides: Hugging Face has its rows behind those of that head's
            query, Megatron-core behind those of all queries of the key-value head (``attention_output_gate``).
    """

    heads: int
    kv_heads: int
    gated: bool = False

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        per_group = self.heads // self.kv_heads
        queries = per_group * (1 + self.gated)
        rest = tuple(tensor.shape[1:])
        head_dim = tensor.shape[0] // (self.kv_heads * (queries + 2))
        grouped = tensor.reshape(self.kv_heads, queries + 2, head_dim, *rest)
        query = grouped[:, :queries].reshape(self.kv_heads, 1 + self.gated, per_group, head_dim, *rest)
        parts = (query.transpose(1, 2), grouped[:, queries], grouped[:, queries + 1])
        return [part.reshape(math.prod(part.shape) // math.prod(rest), *rest) for part in parts]


@dataclass(frozen=True)
class MergedQKV:
    """One projection of query, key and value on both sides, of as many heads each: Megatron-core interleaves them by head.

    Attributes:
        heads: attention heads.
    """

    heads: int

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return shapes[0]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        import torch

        return [torch.cat(list(GroupedQKV(self.heads, self.heads).split(tensor)))]
