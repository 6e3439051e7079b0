"""Rules that convert a Megatron-core tensor to Hugging Face tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class Rearrangement(Protocol):
    """Conversion of one whole Megatron-core tensor to Hugging Face tensors.

    A conversion never runs on weights. It runs once on shapes, and a few times on tensors of element numbers, which
    show the place of each element. It may only move elements; if it scales, shifts or mixes them, it is detected and
    rejected. To add a constant, use the rule's `shift`.
    """

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""


@dataclass(frozen=True)
class Section:
    """Rows of a Megatron-core tensor that are a separate tensor in distributed checkpoints, such as ``z`` of
    ``in_proj.weight.z``.

    Attributes:
        name: suffix that is appended to the name of the whole tensor.
        rows: number of rows.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class Rule:
    """Rule for tensors of one kind, in all layers and experts.

    In names, ``{layer}`` and ``{expert}`` are placeholders for numbers; ``{layer+61}`` is a number with an offset.

    Attributes:
        megatron: Megatron-core's name in distributed checkpoints with a key for each layer and expert, by the
            Transformer Engine layer spec: ``decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight``.
        hugging_face: names of the tensors that it is converted to. ``name[{expert}]`` is one index of the first axis of
            a stacked tensor.
        conversion: the conversion.
        copies: names of further tensors with the same elements as the first tensor. They are written on the way to
            Hugging Face, and not read on the way back.
        part_of_copies: optional part that the copies belong to.
        vocabulary: whether the first axis is the vocabulary, which trainers may pad.
        halves: whether the Megatron-core tensor is a concatenation of two halves (all gate rows, then all up rows),
            each of which tensor parallelism splits separately.
        sections: sections of rows that Megatron-core declares separately and tensor parallelism splits separately.
            Together they contain all rows of the tensor. Empty if Megatron-core declares the tensor as a whole.
        by_heads: whether the first axis has the same number of elements for each head, and tensor parallelism splits it
            although it does not split tensors of that name in other models, such as a norm over all heads together.
        every: number of kinds of elements, such as gate and up, that alternate along the last axis of Hugging Face's
            tensors. The conversion sees that axis as two axes, the latter of this length.
        shift: constant that is added to each element on the way to Hugging Face, and subtracted on the way back, such
            as one for a norm that Megatron-core stores as an offset from one. Must be a finite float32; the tensors
            must be floating-point with at least 16 bits, and must not be the vocabulary.
        part: name of an optional part of the model, such as ``mtp``, that a checkpoint contains completely or not at
            all; empty if the tensor belongs to every checkpoint.
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
        """The shape of a Hugging Face tensor with the axes of the conversion; see `every`."""
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
    """Two tensors of the same shape, concatenated, such as all gate rows and then all up rows.

    Attributes:
        axis: axis of the concatenation.
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
    """A transposed matrix."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        rows, columns = shapes[0]
        return (columns, rows)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        return [tensor.t()]


@dataclass(frozen=True)
class OneRow:
    """A vector that Hugging Face stores as a matrix of one row."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return shapes[0][1:]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        return [tensor[None]]


@dataclass(frozen=True)
class Alternating:
    """Two concatenated halves whose rows alternate along Hugging Face's last axis, with the other axes in reverse
    order.

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
        heads: number of attention heads.
        kv_heads: number of key-value heads.
        gated: whether the query projection also computes a gate for each head. Hugging Face stores the gate's rows
            after those of the head's query, Megatron-core after those of all queries of the key-value head
            (``attention_output_gate``).
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
    """One projection of query, key and value, with the same number of heads each, on both sides.

    Megatron-core interleaves them by head.

    Attributes:
        heads: number of attention heads.
    """

    heads: int

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return shapes[0]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        import torch

        return [torch.cat(list(GroupedQKV(self.heads, self.heads).split(tensor)))]
