"""Trainer's side of vLLM's weight transfer: `send_weights` creates a version, which engines with the weight-transfer
engine ``weighbridge`` pull.

Importing it registers it with vLLM's ``WeightTransferTrainerFactory``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge.follow.answers import refused
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.status import label
from weighbridge.follow.vllm import OTHER
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, Ranks, RanksFailed, agree
from weighbridge.integrations.vllm import NAME
from weighbridge.integrations.vllm.engines import STAGE, UNDO
from weighbridge.integrations.weight_updates import PluginSettings, UpdateSender, WeightUpdate, taken_to_the_end

T = TypeVar("T")


@dataclass
class WeighbridgeTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is seen as untyped
    """Settings for the destination of weights, and the rank of this process in the trainer (``rank``, by keyword).

    Attributes:
        model: ``namespace/name``.
        server: ``host:port`` of the service's gRPC endpoint; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        engine_server: how engines reach the service, if not as the trainer does.
        hf_dir: folder with ``config.json`` and the tokenizer, by which rank 0 registers the model; not needed if it is
            registered.
        dtype: dtype to register the model with, such as ``bf16``; by default the dtype in the folder's config.
        run: name of the training run; part of the versions' lineage.
        ranks: number of the trainer's ranks that push. With 1, rank 0 pushes, and the others discard the gathered
            tensors. With all ranks, all receive each tensor and push their share of it; or each pushes the tensors in
            the source's ``held_names``.
        group: process group, over host memory, of the ranks that push: an error on one of them is raised on all. By
            default the default group, if its size matches. Without a group, each rank raises only its own errors, and
            the ranks identify an update by the number of the send.
        cast: which casts to the registered dtype a push may make, as for `TrainerClient.push_state_dict`.
        lane: how weights travel: ``grpc``, ``local`` or ``auto``.
        buffer_bytes: host memory of a rank for data that is sent over gRPC.
        retry_seconds: how long to retry while the service is unreachable.
        stale_drafter: policy for updates that leave the engines' drafter behind: ``refuse`` or ``allow``; None keeps
            their start setting.
    """

    backend: ClassVar[str] = NAME

    model: str
    server: str | None = None
    engine_server: str | None = None
    hf_dir: str | None = None
    dtype: str = ""
    run: str = "default"
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    cast: str = "allow"
    lane: str | None = None
    buffer_bytes: int = 256 << 20
    retry_seconds: float = 60.0
    stale_drafter: str | None = None


class WeighbridgeTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is seen as untyped
    """One rank of a trainer.

    Args:
        init_info: destination of weights.
        client: vLLM's client of the engines; called by rank 0.
        source: the weights.

    Attributes:
        pushed: this rank's newest push.
    """

    init_info_cls = WeighbridgeTrainerInitInfo

    def __init__(self, init_info: WeighbridgeTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.pushed: PushHandle | None = None
        self._info = init_info
        self._sent = 0
        self._ranks = _those_that_push(init_info)
        said = {each.name: getattr(init_info, each.name) for each in fields(PluginSettings)}
        self._settings = PluginSettings(**said)
        self._sender = UpdateSender(self._settings)

    @classmethod
    def trainer_init(
        cls, init_info: WeighbridgeTrainerInitInfo, *, client: Any, source: Any = None
    ) -> WeighbridgeTrainerEngine:
        """Register the model, if configured, and give the engines the source of versions.

        Raises:
            InvalidArgument: no source was given, or the group does not consist of the ranks that push.
            EngineFailed: the engines refuse; states why.
            NotFound: the model is not registered.
            RanksFailed: one of these errors occurred on another rank; states which.
        """
        if source is None:
            raise InvalidArgument(
                f"the backend {NAME} sends a WeightSource", fix="give one: source=ModuleSource(model)"
            )
        engine = cls(init_info, client=client, source=source)
        if init_info.rank < init_info.ranks:
            engine._together(engine._introduce)
        return engine

    def send_weights(self) -> None:
        """Push the source's weights as a version; rank 0 then updates the engines to exactly that version.

        The source is always iterated to its end, because ranks gather together.

        Raises:
            As `TrainerClient.push_gathered`, and:
            VersionFailed: the version could not be completed; no engine was changed.
            EngineFailed: the engines could not be updated, and keep their weights; states why.
            RanksFailed: one of these errors occurred on another rank; states which.
        """
        if self._info.rank >= self._info.ranks:
            for _ in self.source:
                pass
            return
        self._sent += 1  # before anything can fail: ranks without a group identify the update by this number
        with taken_to_the_end(self.source):
            held = self._together(self._held)
            update = self._update()
        number = self._together(partial(self._push, update, held))
        self._together(partial(self._bring, number))

    def shutdown(self) -> None:
        """End the connection to the service."""
        self._sender.close()

    def _together(self, step: Callable[[], T]) -> T:
        """Result of a step on this rank. If the step fails on a rank that pushes, that rank raises its own error, and
        all other ranks raise too if they share a group.
        """
        if self._ranks is None:
            return step()
        try:
            return agree(self._ranks, "another rank of the trainer has failed", step)
        except RanksFailed as failed:
            raised = failed.__cause__ or failed
        raise raised

    def _introduce(self) -> None:
        """Send engines the source of versions, or wait until rank 0 has registered the model."""
        info = self._info
        if not info.is_sender:
            self._sender.wait_registered(info.retry_seconds)
            return
        self._sender.register()
        self._ask("init_weight_transfer_engine", self._settings.init_info)

    def _held(self) -> Collection[str] | None:
        """Names of the tensors that this rank receives; None if all ranks receive all tensors."""
        return None if self._info.ranks == 1 else self.source.held_names()

    def _update(self) -> WeightUpdate | None:
        """The update of this send, broadcast by rank 0; None if it cannot be.

        The number alone would match a version from before a restart of the trainer.
        """
        mine = WeightUpdate.new() if self.is_sender else None
        if self._info.ranks == 1:
            return mine
        if self._ranks is None:
            return None
        return next(filter(None, self._ranks.all_gather_object(mine)), None)

    def _push(self, update: WeightUpdate | None, held: Collection[str] | None) -> int:
        """The number of the version, once it is ready."""
        info = self._info
        self.pushed = self._sender.send(
            update,
            self._given(),
            step=self._sent,
            rank=info.rank,
            ranks=info.ranks,
            buffer_bytes=info.buffer_bytes,
            held=held,
        )
        return self.pushed.wait(VersionState.READY).number

    def _given(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this rank receives. A source contains None for tensors of other ranks."""
        for name, tensor in self.source:
            if tensor is not None:
                yield name, tensor

    def _bring(self, number: int) -> None:
        """Make engines update to the version, if this is rank 0."""
        if not self.is_sender:
            return
        try:
            self._ask("start_weight_update")
            self._take(number)
        except BaseException:  # a start whose response was lost has begun too
            with suppress(EngineFailed):  # vLLM requires it before the next update, and raises
                self._ask("finish_weight_update")
            raise
        self._ask("finish_weight_update", label(self._info.model, number))

    def _take(self, number: int) -> None:
        """Update all engines behind the client to the version, or none: no engine changes before all have all bytes,
        and updated engines roll back if one fails.
        """
        update = {"version": number}
        self._ask("update_weights", {**update, "phase": STAGE})
        try:
            self._ask("update_weights", update)
        except BaseException:
            # an engine that did not update has nothing to roll back, and raises
            with suppress(EngineFailed):
                self._ask("update_weights", {**update, "phase": UNDO})
            raise

    def _ask(self, method: str, *arguments: Any) -> None:
        """Call a method of the client.

        Errors are raised with the engine's own message, because the client's error contains only the HTTP status.
        """
        try:
            getattr(self.client, method)(*arguments)
        except WeighbridgeError:
            raise
        except Exception as error:
            answer = getattr(error, "response", None)
            if answer is not None:
                raise refused(f"/{method}", answer.status_code, answer.content, OTHER) from error
            raise EngineFailed(f"the engine did not answer {method}: {error}") from error


def _those_that_push(info: WeighbridgeTrainerInitInfo) -> Ranks | None:
    """The ranks that push, if there are several, this is one of them, and they are exactly the ranks of
    torch.distributed.
    """
    if not info.rank < info.ranks > 1:
        return None
    if info.group is None:
        known = dist.is_available() and dist.is_initialized() and dist.get_world_size() == info.ranks
        return ProcessGroup() if known else None
    found = ProcessGroup(info.group)
    if found.size != info.ranks:
        raise InvalidArgument(
            f"the group has {found.size} ranks, but {info.ranks} ranks push",
            fix=(
                "group=torch.distributed.new_group(RANKS, backend='gloo'), created on all ranks, "
                f"with the {info.ranks} that push"
            ),
        )
    return found


if NAME not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(NAME, WeighbridgeTrainerEngine)
