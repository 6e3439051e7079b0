"""Storage writer of `torch.distributed.checkpoint` that creates a version from each checkpoint.

Each save has its own name, but its plan may be older, because planners cache plans. So the version's step is determined
at the beginning of a save, and only names and boxes are read from the plan. The coordinator seals last, in
`WeighbridgeWriter.finish`, which DCP calls once all ranks have written: no version becomes visible before that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from weighbridge._clients.holding.policy import HoldPolicy
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options_of_each
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.shortening import shortened
from weighbridge._formats.dtensors import local_tensor
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.push_sources import HeldShards, StagingPool, TensorSource
from weighbridge._formats.torch_state import ALLOW, check_cast
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError, WeighbridgeError
from weighbridge.integrations.checkpoint_names import step_named
from weighbridge.integrations.torch.boundary import flat_errors
from weighbridge.integrations.torch.entries import (
    Entries,
    PlannedShards,
    check_none_absent,
    check_one_box,
    planned_shards,
    untied,
)


class WeighbridgeWriter(StorageWriter):
    """A storage writer for ``dcp.save`` and ``dcp.async_save``, for one checkpoint or several. All ranks create one.

    Args:
        model: ``namespace/name``, registered before.
        server: ``host:port`` of the service; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. Or a client, which
            stays open.
        step: the training step, or a function that returns it at each save. By default the number at the end of the
            ``checkpoint_id``.
        prefix: possible prefix of the model's names in the flattened state dict: ``model.`` if it is
            ``{"model": ...}``.
        cast: as for `TrainerClient.push_state_dict`.
        until: the state that a save waits for: ``ready``, ``verified`` or ``durable``.
        run, retry_seconds, lane: as for `TrainerClient`.
        options: of each version, as for `TrainerClient.push`: ``metadata``, ``candidate``, ``allow_nonfinite``,
            ``max_hold_s``. A failed save raises ``CheckpointException`` on all ranks, through torch's own agreement; so
            ``on_failure="warn"`` is refused.

    Attributes:
        model: the model.
        last: this rank's newest push, or None.
        version: the newest version that a save has waited for; set only on the coordinator.

    Raises:
        InvalidArgument: ``cast`` or ``until`` is not known.

    Examples:
        >>> with WeighbridgeWriter("acme/smol", server, step=200) as writer:
        ...     metadata = dcp.save({"model": model.state_dict()}, storage_writer=writer)
        >>> print(writer.version)
        acme/smol@2 (durable, step 200)
    """

    def __init__(
        self,
        model: str,
        server: str | TrainerClient | None = None,
        *,
        step: int | Callable[[], int] | None = None,
        prefix: str = "model.",
        cast: str = ALLOW,
        until: VersionState | str = VersionState.DURABLE,
        run: str = "default",
        retry_seconds: float = 60.0,
        lane: str | None = None,
        **options: Unpack[PushOptions],
    ) -> None:
        super().__init__()
        check_cast(cast)
        check_options_of_each(options)
        if HoldPolicy.of(options).warns:
            raise InvalidArgument(
                "dcp.save has no way to skip a save",
                fix="catch torch.distributed.checkpoint.api.CheckpointException around it: all ranks raise it",
            )
        self._options = options
        self.model = model
        self.last: PushHandle | None = None
        self.version: Version | None = None
        self._step = step
        self._prefix = prefix
        self._cast = cast
        self._until = _awaited(until)
        self._given = server if isinstance(server, TrainerClient) else None
        self._connects_with: dict[str, Any] = {
            "server": None if self._given else server, "run": run, "retry_seconds": retry_seconds, "lane": lane,
        }  # fmt: skip
        self._made: TrainerClient | None = None
        self._staging = StagingPool()
        self._checkpoint: str | os.PathLike[str] | None = None
        self._saving_step = 0
        self._rank = 0
        self._coordinates = False

    def close(self) -> None:
        """Abort an unfinished save, and close the connection unless a client was passed in."""
        self._give_up("the writer was closed")
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for a separate process in which ``dcp.async_save`` may save: everything except connections."""
        if self._given is not None:
            raise FailedPrecondition(
                "a writer that was given a client cannot save in another process",
                fix="give it the server's address instead",
            )
        return {**vars(self), "_made": None, "_staging": None, "last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _staging=StagingPool())

    # Methods in the order in which DCP calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Record the name of the checkpoint to save; DCP passes it only if the user named one."""
        self._checkpoint = checkpoint_id

    def storage_meta(self) -> StorageMeta | None:
        """Description of the checkpoint for planners."""
        return StorageMeta(checkpoint_id=self._checkpoint)

    @flat_errors
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save: determine its step, and check that the service knows the model.

        Raises:
            InvalidArgument: the step is unknown, or the ranks save without coordination.
            NotFound: the model is not registered.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "the ranks of a version must communicate with each other",
                fix="save with use_collectives=True",
            )
        self._give_up("another save has begun")
        named = self._checkpoint
        self._checkpoint = None  # the next save may have no name
        self._saving_step = self._step_of(named)
        self._rank = int(kwargs.get("rank") or 0)
        self._coordinates = is_coordinator
        self._client.describe_tensors(self.model, refresh=True)

    @flat_errors
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse entries that do not belong to the model, while no rank waits for another.

        Raises:
            LayoutError: as `TrainerClient.push_state_dict`; or some entries do not belong to the model, such as an
                optimizer's.
        """
        planned_shards(plan.items, self._entries, self._cast)
        return plan

    @flat_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse plans that omit a tensor, before a version is opened. Send each rank the number of plans.

        Raises:
            LayoutError: no rank has any part of a tensor; names each such tensor.
        """
        if all(plan.usable for plan in plans):  # unusable plans were checked earlier
            check_none_absent([item.index.fqn for plan in plans for item in plan.items], self._entries)
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    @flat_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Push this rank's shards, and return when they have arrived. The coordinator does not seal yet.

        Raises:
            LayoutError: the ranks together do not have the whole model, or a tensor differs from the plan.
            WeighbridgeError: the push failed.
        """
        planned = planned_shards(plan.items, self._entries, self._cast)
        shards = _PlannedShards(planned, planner, self._entries, self._staging)
        handle = self.last = self._client.push_shards(
            self.model, planned.layout, TensorSpace.HUGGING_FACE, shards, step=self._saving_step, rank=self._rank,
            world_size=int(plan.storage_data), hold_seal=self._coordinates, **self._options,
        )  # fmt: skip
        try:
            handle.report()
        except BaseException as error:
            self._give_up(shortened(f"rank {self._rank} has failed: {error}", 400))
            raise
        written: Future[list[WriteResult]] = Future()
        written.set_result([_result(item) for item in plan.items])
        return written

    @flat_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal the version, and wait for it.

        Raises:
            VersionFailed: the version cannot be completed.
            WeighbridgeError: the call to the service failed.
        """
        handle = self.last
        assert handle is not None  # noqa: S101 (DCP has written before)
        handle.seal()
        self.version = handle.wait(self._until)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name contains a step."""
        return step_named(checkpoint_id) is not None

    @property
    def _client(self) -> TrainerClient:
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = TrainerClient(**self._connects_with)
            weakref.finalize(self, self._made.close)
        return self._made

    @property
    def _entries(self) -> Entries:
        return Entries(TensorForms.of(self._client.describe_tensors(self.model)), self._prefix)

    def _step_of(self, named: str | os.PathLike[str] | None) -> int:
        step = self._step() if callable(self._step) else self._step
        if step is None and named is not None:
            step = step_named(named)
        if step is None:
            raise InvalidArgument(
                "the step of the save is not known",
                fix=(
                    "give WeighbridgeWriter(model, step=...), or a checkpoint_id that ends with "
                    "the step, such as 'step-100'"
                ),
            )
        return step

    def _give_up(self, reason: str) -> None:
        """Abort the newest push unless it is sealed, so that no other rank waits for it."""
        handle = self.last
        if handle is not None and not handle.sealed:
            self.last = None
            with contextlib.suppress(WeighbridgeError):
                self._client.abort(self.model, handle.number, reason)


class _PlannedShards(HeldShards):
    """Shards of a save plan. Their data is requested once they are selected, when all ranks are here: planners may
    create it only then.

    Args:
        planned: the shards.
        planner: planner of the save.
        entries: entries of the model.
        staging: buffers for the shards that are sent over gRPC.
    """

    def __init__(self, planned: PlannedShards, planner: SavePlanner, entries: Entries, staging: StagingPool) -> None:
        self._planned = planned
        self._planner = planner
        self._entries = entries
        self._staging = staging

    def select(self, indexes: Sequence[int], stream: Layout) -> TensorSource:
        """See `HeldShards.select`.

        Raises:
            LayoutError: a tensor differs from its plan, or the model does not have it; names each.
        """
        return TensorSource(self._staging, stream, self._resolved(indexes))

    def _resolved(self, indexes: Sequence[int]) -> list[torch.Tensor]:
        planned, planner = self._planned, self._planner
        problems = [
            f"{entry}: the model has no such tensor, and it is not a tied copy of one that it has"
            for entry in untied(planner, planned.copies, self._entries, by_content=True)
        ]
        tensors = []
        for item, parts in itertools.groupby([planned.sources[index] for index in indexes], lambda each: each[0]):
            check_one_box(planner, item.index.fqn)
            tensor = planner.resolve_data(item)
            extent = list(item.tensor_data.chunk.sizes) if item.tensor_data else []
            if isinstance(tensor, torch.Tensor) and list(tensor.shape) == extent:
                held = local_tensor(tensor)
                tensors += [part.view(held) for _, part in parts]
            else:
                there = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                problems.append(f"{item.index.fqn} is {there}, but its plan declares {extent}")
        if problems:
            raise LayoutError("the tensors to be saved differ from those of the model", details=problems)
        return tensors


def _awaited(until: VersionState | str) -> VersionState:
    allowed = {state.value: state for state in (VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE)}
    found = allowed.get(until.value if isinstance(until, VersionState) else until)
    if found is None:
        raise InvalidArgument(f"a save cannot wait for {until!r}", fix="until=" + " or ".join(map(repr, allowed)))
    return found


def _result(item: WriteItem) -> WriteResult:
    return WriteResult(item.index, item.tensor_storage_size() or 0, None)
