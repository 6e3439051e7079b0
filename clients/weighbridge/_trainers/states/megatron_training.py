"""Training state of a Megatron-core rank: the shards of its model, and of its optimizers' state by the keys of
Megatron's own checkpoints.

The keys are those that ``dist_checkpointing`` gives a model and its optimizer (for the distributed optimizer: as
``fully_reshardable``), without the prefixes of chained optimizers:
``optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.flat_ranges import RangePart
from weighbridge._formats.megatron_state import ShardedEntry, ShardedTensors, is_main
from weighbridge._formats.misfits import Misfit, told
from weighbridge._trainers.states.megatron_optimizer import RankOptimizer, rank_optimizers
from weighbridge._trainers.states.megatron_pieces import Piece, pieces_of
from weighbridge._trainers.states.megatron_values import FittedValues, values_of
from weighbridge._trainers.states.training_state import Filling, RankRestore, StoredState, TrainingTensors
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

_STATE = "optimizer.state."
_NAMED = 20


def training_tensors(model: ShardedTensors, optimizer: Any) -> TrainingTensors:
    """Return the tensors of its model and its optimizer that a rank pushes. Does not communicate.

    Args:
        model: result of `sharded_tensors` for the model's state dict.
        optimizer: result of ``get_megatron_optimizer``; None pushes only the model.

    Raises:
        InvalidArgument: the optimizer is not a Megatron optimizer.
        LayoutError: the optimizer updates parameters that are not in the state dict, or its state is not elementwise.
        FailedPrecondition: the optimizer has not made a step yet.
    """
    held = _Held.of(model, rank_optimizers(optimizer))
    pushed = [index for index, (_, shard, _) in enumerate(held.states) if shard.main or held.alike[index]]
    layout, tensors = held.joined(pushed)
    values = {
        "optimizer": values_of(held.optimizers),
        # objects without data are stored too, because Megatron does not load a checkpoint that lacks one
        "objects": {each.unique_key: _plain(each.data) for each in model.objects},
    }
    return TrainingTensors(layout, tensors, values, TensorSpace.MEGATRON)


class MegatronRestore(RankRestore):
    """Restore of a Megatron-core rank from a training state of any parallelism.

    It allocates the state of an optimizer that has none. If the vocabulary has more padding than the stored one, the
    additional rows are unchanged. ``ShardedObject``s get the stored data of their key, if it exists.

    Args:
        model, optimizer: see `training_tensors`; filled in place.

    Raises:
        The errors of `training_tensors`, except FailedPrecondition.
    """

    def __init__(self, model: ShardedTensors, optimizer: Any) -> None:
        self._model = model
        self._optimizers = rank_optimizers(optimizer)

    def fit(self, stored: StoredState) -> Filling:
        """See `RankRestore.fit`."""
        _check_trainer(stored)
        values = FittedValues(self._optimizers, stored.values["optimizer"])
        fresh = [each for each in self._optimizers if each.allocate()]
        try:
            held = _Held.of(self._model, self._optimizers)
            layout, tensors = held.fitted(stored.tensors, stored.name)
        except BaseException:
            _drop(fresh)
            raise
        return _MegatronFilling(layout, tensors, self._model, self._optimizers, values, fresh, stored.values["objects"])


@dataclass(frozen=True)
class _MegatronFilling(Filling):
    """Filling of a Megatron-core rank.

    Attributes:
        model: shards of the model.
        optimizers: optimizers of the rank.
        values: their values.
        fresh: optimizers whose state was allocated.
        objects: stored data of ``ShardedObject``s, by key.
    """

    model: ShardedTensors
    optimizers: Sequence[RankOptimizer]
    values: FittedValues
    fresh: Sequence[RankOptimizer]
    objects: Mapping[str, Any]

    def finish(self) -> None:
        """See `Filling.finish`."""
        import torch

        with torch.no_grad():
            self.model.finish_restore()
            for each in self.optimizers:
                each.put_back()
            self.values.give()
            for found in self.model.objects:
                if found.unique_key in self.objects:
                    found.data = as_data(self.objects[found.unique_key])

    def undo(self) -> None:
        """See `Filling.undo`."""
        _drop(self.fresh)


def _drop(optimizers: Iterable[RankOptimizer]) -> None:
    """Remove the state of optimizers."""
    for each in optimizers:
        each.drop()


@dataclass(frozen=True)
class _Held:
    """Model and optimizers of a rank.

    Attributes:
        model: the shards of the model.
        optimizers: optimizers of the rank.
        states: for each shard of the optimizers' state, the spec of its tensor, the shard, and a tensor with its
            elements.
        alike: for each of these shards, whether its replicas are equal on all ranks that hold them.
        resizable: names of tensors whose shape may differ between jobs.
    """

    model: ShardedTensors
    optimizers: Sequence[RankOptimizer]
    states: Sequence[tuple[TensorSpec, Shard, torch.Tensor]]
    alike: Sequence[bool]
    resizable: frozenset[str]

    @staticmethod
    def of(model: ShardedTensors, optimizers: Sequence[RankOptimizer]) -> _Held:
        """Read the state of optimizers. Raises the errors of `training_tensors`."""
        resizable = {
            entry.declared.key for entry in model.entries if getattr(entry.declared, "allow_shape_mismatch", False)
        }
        of_parameter = {id(entry.declared.data): entry for entry in model.entries}
        states: list[tuple[TensorSpec, Shard, torch.Tensor]] = []
        alike: list[bool] = []
        for optimizer in optimizers:
            _check_known(optimizer, of_parameter)
            parts: dict[int, list[tuple[Piece, Box, RangePart]]] = {}
            for state in optimizer.states():
                entry = of_parameter[id(state.parameter)]
                # all states of a parameter have the same elements
                found = parts.get(id(entry.declared))
                if found is None:
                    size = state.flat.numel()
                    found = [(piece, *each) for piece in pieces_of(entry) for each in piece.parts(state.first, size)]
                    parts[id(entry.declared)] = found
                main = is_main(optimizer.replica_id(entry.declared.replica_id))
                dtype = dtypes.from_torch(state.flat.dtype)
                for piece, box, part in found:
                    spec = TensorSpec(f"{_STATE}{state.name}.{piece.key}", dtype, piece.shape)
                    if piece.key in resizable:
                        resizable.add(spec.name)
                    states.append((spec, Shard(spec.name, box, main=main), part.of(state.flat)))
                    alike.append(optimizer.replicas_alike)
        return _Held(model, optimizers, states, alike, frozenset(resizable))

    def joined(self, chosen: Sequence[int]) -> tuple[Layout, tuple[torch.Tensor, ...]]:
        """Return the shards of the model and the chosen shards of the optimizers' state as one stream, with their
        tensors.
        """
        states = [self.states[index] for index in chosen]
        layout = Layout.stream(
            [*self.model.layout.tensors.values(), *(spec for spec, _, _ in states)],
            [*(each.shard for each in self.model.layout.placements), *(shard for _, shard, _ in states)],
        )
        return layout, (*self.model.tensors, *(tensor for _, _, tensor in states))

    def fitted(self, stored: Mapping[str, TensorSpec], of: str) -> tuple[Layout, tuple[torch.Tensor, ...]]:
        """Return all shards as one stream of stored tensors, with their tensors.

        Raises:
            LayoutError: tensors are stored with another dtype or shape, or not at all (names them).
        """
        layout, tensors = self.joined(range(len(self.states)))
        misfits = [
            misfit
            for spec in layout.tensors.values()
            if (misfit := _misfit(spec, stored.get(spec.name), resizable=spec.name in self.resizable))
        ]
        if misfits:
            raise LayoutError(
                (
                    f"{of} is the training state of a different model or optimizer: "
                    f"{counted(len(misfits), 'tensor differs', 'tensors differ')}"
                ),
                details=first_lines(told(misfits)),
                fix="build model and optimizer with the configuration that the state was pushed with",
            )
        shards, clipped = [], []
        for placement, tensor in zip(layout.placements, tensors, strict=True):
            spec, box = stored[placement.shard.tensor], placement.shard.box
            common = box.intersect(Box.whole(spec.shape))
            if common is None:
                continue
            shards.append(placement.shard._replace(box=common))
            clipped.append(tensor if common == box else _part(tensor, common.relative_to(box.offset)))
        return Layout.stream(stored.values(), shards), tuple(clipped)


def _check_trainer(stored: StoredState) -> None:
    if "objects" not in stored.values:
        raise LayoutError(
            f"{stored.name} was not pushed from a Megatron-core model",
            fix="restore it with restore_state_dict into the torch module that it was pushed from",
        )


def _check_known(optimizer: RankOptimizer, of_parameter: Mapping[int, ShardedEntry]) -> None:
    unknown = [each for each in optimizer.parameters() if id(each) not in of_parameter]
    if unknown:
        raise LayoutError(
            f"{counted(len(unknown), 'parameter')} of the {optimizer.kind} are not in the sharded state dict",
            details=[f"one of shape {list(each.shape)}, {each.dtype}" for each in unknown[:_NAMED]],
            fix=(
                "pass the sharded_state_dict() of the model that the optimizer was built from, "
                "with all its chunks and unchanged"
            ),
        )


def _misfit(spec: TensorSpec, stored: TensorSpec | None, *, resizable: bool) -> Misfit | None:
    if stored is None:
        return Misfit(f"{spec.name} is not stored", "are not stored", spec.name)
    if stored.dtype != spec.dtype:
        alike = f"{spec.dtype} here and {stored.dtype} stored"
        return Misfit(f"{spec.name} is {alike}", f"are {alike}", spec.name)
    if stored.shape != spec.shape and not (resizable and stored.shape[1:] == spec.shape[1:]):
        return Misfit(f"{spec.name} has shape {list(spec.shape)} here and {list(stored.shape)} stored")
    return None


def _plain(data: Any) -> Any:
    """Return the data of a ``ShardedObject`` in the form that is stored. A file in memory, which is the extra state of
    older Transformer Engine, becomes its bytes.
    """
    return data.getvalue() if isinstance(data, io.BytesIO) else data


def as_data(kept: Any) -> Any:
    """Inverse of `_plain`."""
    return io.BytesIO(kept) if isinstance(kept, bytes) else kept


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a part of a shard's tensor, which lacks prepended axes."""
    for axis in range(tensor.dim()):
        at = len(box.offset) - tensor.dim() + axis
        tensor = tensor.narrow(axis, box.offset[at], box.extent[at])
    return tensor
