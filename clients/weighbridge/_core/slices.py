"""Requests of engines: whole tensors, the slices of one rank, or explicit boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weighbridge.errors import InvalidArgument

__all__ = ["Boxes", "ExpertParallel", "FullTensors", "LayoutRequest", "TensorParallel"]

MAX_VOCAB_MULTIPLE = 1 << 16
"""Maximum multiple to which a vocabulary is padded.

Engines use 64, and trainers up to 128 times the number of their ranks.
"""
_MAX_SIZE = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class FullTensors:
    """Whole tensors.

    Attributes:
        names: names of the tensors, in this order; all tensors of the model if empty.
    """

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Distribution of the experts of a model: each rank has a contiguous block of experts, and all blocks have the same
    length.

    Attributes:
        size: number of ranks, or groups of ranks, over which the experts are distributed.
        rank: index of the block, from 0.
        tp_size: number of ranks that share the matrices of each expert.
        tp_rank: index of this rank among them, from 0.
    """

    size: int
    rank: int
    tp_size: int = 1
    tp_rank: int = 0


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Slices of one rank of an engine, by the model's own parallel plan.

    Key-value heads are replicated if the model has fewer heads than ranks. A rank gets tensors that the plan does not
    shard whole. It does not get experts and layers of other ranks. If the experts of a layer are stacked in one tensor
    with gate and up side by side, a rank that does not have the whole tensor gets two boxes of it, gate before up.

    Attributes:
        size: number of ranks that share the model.
        rank: index of this rank, from 0.
        experts: distribution of the experts; None if each expert is sharded like the other layers.
        layers: first decoder layer of a pipeline stage, and one past its last; None for all layers. The first stage
            also has the embedding and everything before it, such as image towers. The last stage also has the final
            norm, the output layer (or the embedding, if it is tied) and the layers that predict additional tokens.
        vocab_multiple: with 1, the model's own plan applies to the vocabulary. A larger number is for engines whose
            embedding and output layer are vocabulary-parallel: both are padded with rows of zeros to a multiple of it,
            and then sharded. vLLM and SGLang use 64.

    Raises:
        InvalidArgument: a rank does not exist, layers are out of order, or the multiple is out of range.

    Examples:
        >>> pull = engine.pull("acme/smol", layout=TensorParallel(size=2, rank=1, layers=(0, 1)))
        >>> shapes = {name: tuple(tensor.shape) for name, tensor in pull}
        >>> shapes["model.layers.0.self_attn.q_proj.weight"], shapes["model.layers.0.mlp.down_proj.weight"]
        ((16, 32), (32, 24))
        >>> "model.layers.1.mlp.down_proj.weight" in shapes
        False
    """

    size: int
    rank: int
    experts: ExpertParallel | None = field(default=None, kw_only=True)
    layers: tuple[int, int] | None = field(default=None, kw_only=True)
    vocab_multiple: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _check_rank("tensor-parallel", self.size, self.rank)
        if self.experts is not None:
            _check_rank("expert-parallel", self.experts.size, self.experts.rank)
            _check_rank("expert-tensor-parallel", self.experts.tp_size, self.experts.tp_rank)
        if self.layers is not None:
            first, end = self.layers
            if not 0 <= first < end <= _MAX_SIZE:
                raise InvalidArgument(
                    f"layers {first}:{end} are not a pipeline stage",
                    fix="name its first layer, counted from 0, and one past its last",
                )
        if not 1 <= self.vocab_multiple <= MAX_VOCAB_MULTIPLE:
            raise InvalidArgument(
                f"a vocabulary cannot be padded to a multiple of {self.vocab_multiple}",
                fix=f"use a number from 1 to {MAX_VOCAB_MULTIPLE}; engines pad to 64",
            )


def _check_rank(what: str, size: int, rank: int) -> None:
    if not 0 <= rank < size <= _MAX_SIZE:
        raise InvalidArgument(f"{what} rank {rank} of {size} does not exist", fix="ranks count from 0 to size - 1")


@dataclass(frozen=True, slots=True)
class Boxes:
    """Explicit boxes of tensors.

    Attributes:
        boxes: ``(tensor name, offset, extent)``, offset and extent in elements on each axis. A tensor may occur in
            several boxes.

    Examples:
        >>> rows = Boxes([("model.embed_tokens.weight", (64, 0), (2, 32))])
        >>> [(name, tuple(tensor.shape)) for name, tensor in engine.pull("acme/smol", layout=rows)]
        [('model.embed_tokens.weight', (2, 32))]
    """

    boxes: Sequence[tuple[str, Sequence[int], Sequence[int]]]


LayoutRequest = FullTensors | TensorParallel | Boxes
"""The parts of a version that a pull requests."""
