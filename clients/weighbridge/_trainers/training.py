"""Training states.

They are pushed together with the weights as versions of a part of the model, and restored from that part only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from weighbridge._clients.calls import pull_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.connection import Connection
from weighbridge._core.boxes import Box
from weighbridge._core.engines.golden import BOUND, PROMPTS
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.references import Reference, training_of
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import counted
from weighbridge._formats.torch_state import rank_and_world
from weighbridge._trainers import restoring
from weighbridge._trainers.states import stateful
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb

if TYPE_CHECKING:
    from weighbridge._trainers.states.training_state import RankRestore, RankValues, TrainingState, TrainingTensors

log = logging.getLogger(__name__)

ValuesT = TypeVar("ValuesT", bound=Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class Beside(Generic[ValuesT]):
    """Optimizer and state that a trainer pushes or restores together with its weights.

    Attributes:
        optimizer, state, rank_state: as for `TrainerClient.push_state_dict`.
        rank, world_size: the rank to restore, as for `TrainerClient.restore_state_dict`. A push determines them itself.
    """

    optimizer: Any = None
    state: ValuesT | None = None
    rank_state: ValuesT | None = None
    rank: int | None = None
    world_size: int | None = None

    @property
    def given(self) -> bool:
        """Whether the caller gives anything, so that the call includes a training state."""
        return not (self.optimizer is self.state is self.rank_state is None)


def opening_behind(weights: pb.OpenVersionRequest) -> pb.OpenVersionRequest:
    """Return the opening of the training state that follows these weights, whose version has not been opened yet."""
    own = pb.OpenVersionRequest()
    own.CopyFrom(weights)
    own.model = training_of(weights.model)
    own.ClearField("cast_from")
    # a hold keeps a version from engines; a trainer that resumes needs the newest state in any case
    own.candidate, own.allow_nonfinite = False, True
    for key in own.metadata.keys() & {PROMPTS, BOUND}:  # engines do not serve training states
        del own.metadata[key]
    return own


def training_state(
    held: TrainingTensors, rank: int, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None
) -> TrainingState:
    """Return the training state that a rank pushes after its weights.

    Args:
        held: tensors of model and optimizer that the rank holds.
        rank: number of the rank.
        state, rank_state: see `TrainerClient.push_state_dict`.

    Raises:
        InvalidArgument: values are not plain data (names the entry).
    """
    from weighbridge._trainers.states.training_state import RankValues, TrainingState

    values = RankValues(
        state=stateful.values_of(state, "state"), rank_state=stateful.values_of(rank_state, "rank_state")
    )
    return TrainingState.of(held, values, rank)


def restore_training(
    connection: Connection, meant: Reference, restore: RankRestore, beside: Beside[MutableMapping[str, Any]]
) -> Version:
    """Restore model, optimizer and values of a rank from a training state. If anything does not fit, nothing is
    changed. An error during the transfer has a note that the rank is only partly filled.

    Only the rank's boxes and one blob are transferred. The blob is the rank's own if the same number of ranks pushed
    the state, otherwise that of rank 0.

    Args:
        connection: connection of the client.
        meant: the model or its part, and a version of the part.
        restore: restore of the rank's model and optimizer.
        beside: values to restore, and the rank that restores them.

    Returns:
        The version of the part.

    Raises:
        NotFound: the model or version does not exist.
        InvalidArgument: the version lacks requested values, or ``rank_state`` is requested but a different number of
            ranks pushed it.
        LayoutError: the state does not fit (names each tensor).
        DataLoss: the blob is missing or malformed.
    """
    import torch

    from weighbridge._trainers.states.checkpoints.checkpoint_values import checkpoint_ranks, opened
    from weighbridge._trainers.states.training_state import StoredState, without_blobs

    part = training_of(meant.model)
    plan = connection.run(pull_calls.plan_pull(KnownLayouts(), part, meant.version))
    found, tensors = plan.version, plan.layout.tensors
    others = without_blobs(tensors)
    pushed_by = found.ranks or len(tensors) - len(others)
    rank, world_size = rank_and_world(beside.rank, beside.world_size)
    state, rank_state = beside.state, beside.rank_state
    name = f"{found.model}@{found.number}"
    kept = rank_values(connection, found, tensors, rank if pushed_by == world_size else 0)
    own = checkpoint_ranks(kept, name)
    if rank_state is not None and (pushed_by if own is None else own) != world_size:
        by = f"was pushed by {counted(pushed_by, 'rank')}"
        of = f"was imported with the values of {counted(own or 0, 'rank')}"
        raise InvalidArgument(
            f"{name} {by if own is None else of}, but rank_state= is requested on {world_size}",
            fix=(
                "values of ranks are restored only on the same number of ranks: leave rank_state= "
                "out (checkpoints.restore(rank_state=False)), and start with new ones"
            ),
        )
    values = opened(kept, name, None if rank_state is None else rank)
    stateful.check_kept(state, values.state, "state", name)
    stateful.check_kept(rank_state, values.rank_state, "rank_state", name)
    filling = restore.fit(StoredState(name, others, values.trainer))
    left = stateful.left_out(state, values.state, "state") + stateful.left_out(
        rank_state, values.rank_state, "rank_state"
    )
    if left and own is None and rank == 0:  # imported checkpoints always have other entries
        log.warning("%s was pushed with %s, which this restore leaves out", name, ", ".join(left))
    with torch.no_grad():
        try:
            restoring.hugging_face_shards(connection, Reference.of(part, found.number), filling.layout, filling.tensors)
            filling.finish()
        except BaseException as error:
            filling.undo()
            error.add_note(f"This rank has restored only a part of {name}: restore again before you train or push.")
            raise
    stateful.give_back(state, values.state)
    stateful.give_back(rank_state, values.rank_state)
    return found


def rank_values(connection: Connection, version: Version, tensors: Mapping[str, TensorSpec], rank: int) -> RankValues:
    """Return the values in a rank's blob of a version.

    Raises:
        DataLoss: the blob is missing or malformed.
    """
    import torch

    from weighbridge._trainers.states.training_state import blob_name, read_blob

    name = blob_name(rank)
    spec = tensors.get(name)
    if spec is None or spec.dtype.torch != torch.uint8 or len(spec.shape) != 1:
        raise DataLoss(
            f"{version.model}@{version.number} has no {name}, the values of rank {rank}",
            fix="restore another version; push training states by push or push_state_dict with optimizer= or state=",
        )
    blob = torch.empty(spec.shape, dtype=torch.uint8, device="cpu")
    layout = Layout.stream([spec], [Shard(name, Box.whole(spec.shape))])
    restoring.hugging_face_shards(connection, Reference.of(version.model, version.number), layout, [blob])
    return read_blob(blob, f"{name} of {version.model}@{version.number}")
