"""Model of one rank of SGLang, as `weighbridge.integrations.engine_rank` requires it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

from weighbridge import _lazy as lazy
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import REFUSE, stale_drafter_of
from weighbridge.follow.wanted import Wanted
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, Ranks, exchange, from_first
from weighbridge.integrations.engine_rank.model import EngineModel
from weighbridge.integrations.engine_rank.rank import EngineRank, rank_of
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.sglang.configuration import check_updatable, configuration_of, drafter_of
from weighbridge.integrations.sglang.releases import server_arguments

log = logging.getLogger(__name__)


class SglangModel(EngineModel):
    """A model that SGLang's tensor-parallel ranks update together."""

    kind = "sglang"

    @property
    def ranks(self) -> Ranks:
        """The ranks of the tensor-parallel group; SGLang sends each request to all of them."""
        return ProcessGroup(get_tp_group().cpu_group)

    def configuration(self) -> str:
        """All of SGLang's settings for this rank, except those that identify this start of the engine."""
        return configuration_of(self.model)

    def spare(self, parameter: torch.Tensor) -> int:
        """All elements but one: SGLang's loaders do not write padding, and do not report where it is."""
        return parameter.numel() - 1

    def record_first(self, source: lazy.Source) -> lazy.Recording | None:
        """`record`; if the loader cannot be recorded, SGLang runs it over all tensors."""
        try:
            return self.record(source)
        except Exception as error:
            log.warning(
                "%s is loaded tensor by tensor, because the loader cannot be recorded: %s",
                source.version,
                error,
            )
            return None


def source_of(wanted: Wanted) -> ModelSource:
    """Source of a version."""
    return ModelSource(wanted.model, wanted.server, wanted.lane, wanted.retry_seconds)


def sglang_rank(model: torch.nn.Module) -> EngineRank:
    """The rank of a model of this process."""
    return rank_of(model, SglangModel(model))


def number_on(ranks: Ranks, rank: EngineRank, wanted: Wanted) -> int:
    """Number of the requested version. The first of these ranks resolves a ref. Collective."""
    if wanted.version.isdecimal():
        return int(wanted.version)
    client = rank.client(source_of(wanted))
    return from_first(ranks, lambda: client.version(wanted.model, wanted.version).number)


def number_to_update_to(rank: EngineRank, wanted: Wanted) -> int:
    """`number_on` all ranks that update together.

    Raises:
        FailedPrecondition: the ranks cannot update, because there are pipeline stages, or because responses would still
            be computed from old weights in part.
    """
    arguments = server_arguments()
    check_updatable(arguments)
    rank.engine.apart = drafter_of(arguments)
    rank.stale_drafter = stale_drafter_of(wanted.stale_drafter or REFUSE)
    if get_pp_group().world_size > 1:
        raise FailedPrecondition(
            "pipeline stages of SGLang cannot switch to a version together",
            fix="start the engine without --pp-size, or start it again from the new version",
        )
    return number_on(rank.engine.ranks, rank, wanted)


def evidence(rank: EngineRank, known: Collection[str], wanted: Wanted) -> list[dict[str, Any]]:
    """`EngineRank.evidence` of all ranks, as JSON. Collective.

    Args:
        rank: this rank.
        known: digests of recordings that the caller already has.
        wanted: source of versions, for a rank that does not know it.
    """

    def make() -> dict[str, Any]:
        rank.engine.apart = drafter_of(server_arguments())
        rank.connect(source_of(wanted) if rank.source is None else None)
        return rank.evidence(known).to_json()

    return exchange(rank.engine.ranks, "there is no evidence of what this engine computes with", make)
