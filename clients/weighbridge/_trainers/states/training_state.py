"""Training state of a rank: tensors with their boxes, and one blob with everything else.

It has the same form for every trainer.

Tensors are stored by the boxes that ranks hold, so any other number of ranks can restore them. All other state of a
rank is plain data, which is stored as the bytes of a tensor that no other rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    """Values of a rank other than its tensors: plain data, which `blobs.encode` accepts.

    Attributes:
        trainer: values of the model and optimizer, such as parameter groups, in the form in which they are restored.
        state: values that the caller has named, the same on all ranks.
        rank_state: values that the caller has named, for this rank only.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingTensors:
    """Tensors of a model and its optimizers that one rank holds.

    Attributes:
        layout: the shards as one stream, by the names in the trainer's own checkpoints.
        tensors: one tensor for each placement, with the shape of its box, in its own dtype, on any device.
        values: see `RankValues.trainer`.
        space: `TensorSpace.MEGATRON` if shards themselves mark replicas, `TensorSpace.HUGGING_FACE` if shards with
            equal boxes are replicas.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    values: Mapping[str, Any]
    space: TensorSpace


@dataclass(frozen=True)
class TrainingState:
    """Shards of a training state that one rank pushes.

    Attributes:
        layout: the shards as one stream; the last shard is the rank's blob.
        tensors: one tensor for each placement.
        space: space of the names.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    space: TensorSpace

    @staticmethod
    def of(held: TrainingTensors, values: RankValues, rank: int) -> TrainingState:
        """Return the state of a rank.

        Args:
            held: tensors of the rank. Their ``values`` are those of the trainer.
            values: values of the caller.
            rank: number of the rank.

        Raises:
            InvalidArgument: values are not plain (names the entry).
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
    """A stored training state from which one rank is restored.

    Attributes:
        name: name of the version, for errors.
        tensors: all tensors except the blobs, by name.
        values: `TrainingTensors.values` of this rank; those of rank 0 if a different number of ranks pushed the state.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Filling(ABC):
    """Plan for the restore of a rank from a stored training state that fits it.

    Once the tensors are filled, `finish` is called; if that or the filling fails, `undo`.

    Attributes:
        layout: the shards to read, as one stream.
        tensors: one tensor for each placement, with the shape of its box and in the stored dtype, on any device.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]

    @abstractmethod
    def finish(self) -> None:
        """Put tensors and values into the model and the optimizers."""

    def undo(self) -> None:  # noqa: B027 - most restores make no tensors
        """Remove tensors that were made for the restore, so that no step uses them as state."""


class RankRestore(ABC):
    """Restore of a rank's model and optimizers."""

    @abstractmethod
    def fit(self, stored: StoredState) -> Filling:
        """Fit the rank to a stored training state. Does not change the model; allocates state that an optimizer lacks,
        which `Filling.undo` removes.

        Raises:
            LayoutError: the state belongs to another model or other optimizers; names the mismatches.
        """


def blob_name(rank: int) -> str:
    """Return the name of the tensor that contains a rank's blob."""
    return f"{_BLOB}{rank:05d}"


def without_blobs(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of a stored training state without the blobs."""
    return {name: spec for name, spec in tensors.items() if not name.startswith(_BLOB)}


def read_blob(blob: torch.Tensor, name: str) -> RankValues:
    """Return the values of a stored blob.

    Args:
        blob: a uint8 tensor of one axis in host memory.
        name: name of the blob, for errors.

    Raises:
        DataLoss: the tensor is not the blob of a training state, or has a newer format.
    """
    found = blobs.decode(blob, name)
    if found.get("format") != _FORMAT:
        raise DataLoss(
            f"{name} has format {found.get('format')!r}, and this client reads {_FORMAT}",
            fix="update this client to the release that pushed it",
        )
    trainer, state, rank_state = (
        blobs.by_name(found.get(part), f"{part} of {name}") for part in ("trainer", "state", "rank_state")
    )
    return RankValues(trainer, state, rank_state)
