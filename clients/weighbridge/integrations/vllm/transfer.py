"""Weight-transfer engine ``weighbridge`` of vLLM: maps its calls to an `EngineRank`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.follow.engines import stale_drafter_of, when_asleep_of
from weighbridge.integrations.engine_rank.agreement import RanksFailed, agree
from weighbridge.integrations.engine_rank.rank import known_rank
from weighbridge.integrations.engine_rank.source import ModelSource, check_draft
from weighbridge.integrations.vllm import releases
from weighbridge.integrations.vllm.engines import APPLY, DISCARD, STAGE, UNDO
from weighbridge.integrations.vllm.model import vllm_rank
from weighbridge.integrations.vllm.settings import source_for


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is seen as untyped
    """Service and model of an engine. Not needed for an engine that was loaded from weighbridge.

    Attributes:
        server: ``host:port`` of the service's gRPC endpoint.
        model: ``namespace/name``.
        lane: how weights travel: ``grpc``, ``local`` or ``auto``.
        version: number or ref of any existing version; the worker uses it to determine which slices it needs. The
            latest version may not exist yet.
        when_asleep: policy for updates while the engine's weights sleep, from now on: ``refuse`` or ``wait``; None
            keeps the current policy.
        stale_drafter: policy for updates that leave the drafter of speculative decoding behind, from now on: ``refuse``
            or ``allow``; None keeps the current policy.
    """

    server: str | None = None
    model: str | None = None
    lane: str | None = None
    version: str = "latest"
    when_asleep: str | None = None
    stale_drafter: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is seen as untyped
    """Version of an update, and the step to take.

    Attributes:
        version: its number. Not a ref, because ranks could resolve a ref to different versions.
        draft: the drafter's version that belongs to it, such as ``acme/smol-eagle@5``, if the drafter is a separate
            model; empty to name none.
        phase: ``prepare`` begins to fetch the bytes to this machine and returns immediately; ``apply`` writes them into
            the parameters, and prepares them first if necessary. The other phases are steps of an update of several
            engines (`weighbridge.integrations.vllm.engines`).
    """

    version: int
    phase: Literal["prepare", "apply", "stage", "undo", "discard"] = "apply"
    draft: str = ""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for an invalid version or phase."""
        check_draft(self.draft)
        if type(self.version) is not int:
            raise InvalidArgument(f"update_info names version {self.version!r}", fix="name it by its number")
        if self.phase not in ("prepare", APPLY, STAGE, UNDO, DISCARD):
            raise InvalidArgument(f"update_info has no phase {self.phase!r}", fix="use prepare or apply")


class WeighbridgeTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is seen as untyped
    """Updates the model of one worker from version to version.

    The start and finish calls do nothing: parameters are changed in a single call, when all bytes have arrived.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *given: Any) -> None:
        super().__init__(
            config, *given
        )  # the engine's configuration, device and model; in vLLM 0.24 the parallel configuration and the model
        releases.leave_models_whole()
        configuration = releases.configuration(self.model, given[0])
        self.rank = vllm_rank(self.model, configuration)
        drafting = releases.drafting(configuration)
        if drafting.apart:
            self.rank.engine.apart, self.rank.engine.aside = drafting.name, drafting.model
            self.rank.take_over_drafter(known_rank(drafting.model))
        else:
            self.rank.engine.join(drafting.model, drafting.name)
        self._ranks = int(configuration.parallel_config.world_size)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the service, and determine which slices this rank needs."""
        source = source_for(self.rank.source, init_info.model, init_info.server, init_info.lane)
        connect = partial(self._connect, source, init_info)
        with one_voice(self._ranks):
            agree(self.rank.engine.ranks, "the engine is not connected", connect)

    def _connect(self, source: ModelSource | None, init_info: InitInfo) -> None:
        if init_info.when_asleep is not None:
            self.rank.when_asleep = when_asleep_of(init_info.when_asleep)
        if init_info.stale_drafter is not None:
            self.rank.stale_drafter = stale_drafter_of(init_info.stale_drafter)
        self.rank.connect(source, init_info.version)

    def start_weight_update(self) -> None:
        """Does nothing."""

    def receive_weights(self, update_info: UpdateInfo, *_load_weights: Any, **_more: Any) -> None:
        """Prepare a version, or write it into the parameters."""
        steps = {
            "prepare": self.rank.prepare_all,
            STAGE: self.rank.stage,
            APPLY: self.rank.apply,
            UNDO: self.rank.undo,
        }
        with one_voice(self._ranks):
            if update_info.phase == DISCARD:
                self.rank.discard()
            else:
                source = self.rank.source and self.rank.source.with_draft(update_info.draft)
                steps[update_info.phase](update_info.version, source)

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """End the connection to the service."""
        self.rank.end_reports()
        self.rank.close()

    @staticmethod
    def trainer_send_weights(*_iterator: Any, **_arguments: Any) -> None:
        """Refuse the call, which vLLM 0.24 requires of every engine; weights come from the service.

        Raises:
            FailedPrecondition: always.
        """
        raise FailedPrecondition(
            "trainers do not send weights to engines with this backend", fix="push them to the service"
        )


@contextmanager
def one_voice(ranks: int) -> Iterator[None]:
    """Let only the last rank of each engine raise an error that all ranks have raised.

    vLLM reads the responses of an engine's workers in the order of ranks and stops at the first failure. It would take
    the responses of later ranks for those of the next call.

    Args:
        ranks: ranks of an engine. The group of all ranks may contain those of several engines, one engine after
            another.
    """
    try:
        yield
    except RanksFailed:
        if (get_world_group().rank_in_group + 1) % ranks == 0:
            raise
