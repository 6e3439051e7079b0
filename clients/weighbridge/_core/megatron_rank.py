"""Position of a rank in the grids of a Megatron-core training job."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument

__all__ = ["MegatronRank"]


@dataclass(frozen=True, slots=True)
class MegatronRank:
    """Position of a rank in the grids of a training job. Context and sequence parallelism do not shard weights.

    Attributes:
        tp: rank and size of tensor parallelism.
        pp: rank and size of pipeline parallelism.
        ep: rank and size of expert parallelism.
        etp: rank and size of tensor parallelism inside experts.
        dp: rank among the ranks that hold the same weights; the first holds the main replica.
        expert_dp: the same for experts.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    dp: int = 0
    expert_dp: int = 0

    @staticmethod
    def of_world(rank: int, world: int, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> MegatronRank:
        """Return the position of a rank in a job of ``world`` ranks, in Megatron-core's default order (tp, cp, ep, dp,
        pp).
        """
        if world % (tp * pp) or world % (etp * ep * pp) or not 0 <= rank < world:
            raise InvalidArgument(f"rank {rank} of {world} does not fit TP {tp}, PP {pp}, EP {ep} and expert TP {etp}")
        stage, within = divmod(rank, world // pp)
        return MegatronRank(
            (within % tp, tp), (stage, pp), (within // etp % ep, ep), (within % etp, etp),
            within // tp, within // (etp * ep),
        )  # fmt: skip
