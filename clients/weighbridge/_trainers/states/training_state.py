"""Training state of a rank: tensors by their boxes, and one blob of everything else; the same for every trainer.

Tensors go by the boxes that ranks hold, so they fill any other number of ranks. What is no tensor with boxes is plain data, and each
rank's own: it goes as the bytes of a tensor that no other rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._trainers.states import blobs
from weighbridge.errors import DataLoss

if TYPE_CHECKING:
    import torch

_FORMAT = 1
_BLOB = "rank_state."


@dataclass(frozen=True)
class RankValues:
    """What a rank has to say besides its tensors: plain data, which `blobs.encode` takes.

    Attributes:
        trainer: of what the tensors belong to, such as the optimizer's parameter groups; as that wants it back.
        state: what the caller has named, the same on all ranks.
        rank_state: what the caller has named, of this rank alone.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingTensors:
    """What one rank holds of a model and its optimizers.

    Attributes:
        layout: the shards as one stream, by the names that the trainer's own checkpoints have.
        tensors: one for each of its placements, of the extent of its box, in its own dtype, on any device.
        values: see `RankValues.trainer`.
        space: `TensorSpace.MEGATRON` where shards say which of them are replicas, `TensorSpace.HUGGING_FACE` where equal boxes are.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    values: Mapping[str, Any]
    space: TensorSpace


@dataclass(frozen=True)
class TrainingState:
    """What one rank pushes of a training state.

    Attributes:
        layout: the shards as one stream; the last one is the rank's blob.
        tensors: one for each of its placements.
        space: to which the names belong.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    space: TensorSpace

    @staticmethod
    def of(held: TrainingTensors, values: RankValues, rank: int) -> TrainingState:
        """The state of a rank.

        Args:
            held: its tensors. Their ``values`` are those of the trainer.
            values: those of the caller.
            rank: which rank.

        Raises:
            InvalidArgument: values are not plain; names the entry.
        """
        blob = blobs.encode(
            {
                "format": _FORMAT,
                "trainer": dict(held.values),
                "state": dict(values.state),
                "rank_state": dict(values.rank_state),
            }
        )
        spec = TensorSpec(blob_name(rank), dtypes.parse("u8"), tuple(blob.shape))
        shards = [each.shard for each in held.layout.placements]
        layout = Layout.stream(
            [*held.layout.tensors.values(), spec], [*shards, Shard(spec.name, Box.whole(spec.shape))]
        )
        return TrainingState(layout, (*held.tensors, blob), held.space)


@dataclass(frozen=True)
class StoredState:
    """A stored training state, as one rank is filled from it.

    Attributes:
        name: of the version, for errors.
        tensors: all its tensors but the blobs, by name.
        values: `TrainingTensors.values` of this rank; of rank 0 if it was pushed by another number of ranks.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Filling:
    """How a rank is filled from a stored training state that fits it.

    Attributes:
        layout: the shards that it takes, as one stream.
        tensors: one for each of its placements, of the extent of its box and in the dtype that is stored, on any device.
        finish: is called when they have been filled: brings tensors and values to where they belong.
        undo: is called if they were not: takes away what was made to be filled, so that it is not taken for a state.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[], None]
    undo: Callable[[], None] = lambda: None


Fit: TypeAlias = Callable[[StoredState], Filling]
"""Fits what a rank holds to a stored training state, and changes nothing yet. Raises LayoutError, which names what does not fit."""


def blob_name(rank: int) -> str:
    """Name of the tensor that is a rank's blob."""
    return f"{_BLOB}{rank:05d}"


def without_blobs(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of a stored training state that are no blobs."""
    return {name: spec for name, spec in tensors.items() if not name.startswith(_BLOB)}


def read_blob(blob: torch.Tensor, name: str) -> RankValues:
    """The values of a stored blob.

    Args:
        blob: a uint8 tensor of one axis in host memory.
        name: of the blob, for errors.

    Raises:
        DataLoss: it is none of a training state, or of a later format.
    """
    found = blobs.decode(blob, name)
    if found.get("format") != _FORMAT:
        raise DataLoss(
            f"{name} has format {found.get('format')!r}, and this client reads {_FORMAT}",
            fix="update the client to the version that has pushed it",
        )
    trainer, state, rank_state = (
        blobs.by_name(found.get(part), f"{part} of {name}") for part in ("trainer", "state", "rank_state")
    )
    return RankValues(trainer, state, rank_state)
