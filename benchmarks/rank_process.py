"""``python -m benchmarks.rank_process SPEC``: many trainer ranks of one push in one process, each with a client and a
thread of its own.

SPEC is a `RankSpec` as JSON. Each line on standard input is a `Push` as JSON; the answer is a line of JSON with the
Unix times at which the last of these ranks had ``declared`` (its push returned), ``delivered`` (its shards were
sealed), and heard that the version is ``ready``.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cuts, models
from weighbridge import TrainerClient
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource

MODEL = "bench/ranks"
_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class RankSpec:
    """Specification of the ranks that a process plays.

    Attributes:
        server: address of the service, where the model is registered.
        specs: path of the model's tensors, as `models.write_specs` writes them.
        lane: which lane the ranks take.
        first: the first rank.
        count: number of this process's ranks.
        ranks: ranks of all processes.
    """

    server: str
    specs: str
    lane: str
    first: int
    count: int
    ranks: int


@dataclass(frozen=True)
class Push:
    """One push.

    Attributes:
        step: step of the push, the same for all ranks.
        at: Unix time at which all ranks begin.
    """

    step: int
    at: float


class Rank:
    """One rank, with its shards in memory."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        specs = models.read_specs(Path(spec.specs))
        self._ranks = spec.ranks
        self._rank = rank
        self._client = TrainerClient(spec.server, lane=spec.lane)
        self._layout = Layout.stream(specs, cuts.shards("contiguous", specs, spec.ranks, rank))
        self._bits = models.RandomBits((p.nbytes for p in self._layout.placements), seed=rank)
        self._staging = StagingPool()

    def push(self, push: Push) -> tuple[float, float, float]:
        """Push the shards; Unix times at which this rank had declared, delivered, and heard that the version is
        ready.
        """
        tensors = self._bits.of_layout(self._layout)
        shards = TensorSource(self._staging, self._layout, tensors)
        time.sleep(max(push.at - time.time(), 0.0))
        handle = self._client.push_shards(
            MODEL, self._layout, TensorSpace.HUGGING_FACE, shards, step=push.step, rank=self._rank, world_size=self._ranks
        )  # fmt: skip
        declared = time.time()
        handle.report()
        delivered = time.time()
        if self._rank == 0:
            handle.wait(VersionState.READY, timeout=_WAIT_SECONDS)
        return declared, delivered, time.time()


def main() -> None:
    """Push for each line on standard input, until it ends."""
    spec = RankSpec(**json.loads(sys.argv[1]))
    ranks = [Rank(spec, rank) for rank in range(spec.first, spec.first + spec.count)]
    with ThreadPoolExecutor(spec.count) as threads:
        print("ready", flush=True)
        for line in sys.stdin:
            push = Push(**json.loads(line))
            answer: dict[str, Any]
            try:
                moments = list(zip(*threads.map(Rank.push, ranks, [push] * len(ranks)), strict=True))
                answer = dict(zip(("declared", "delivered", "ready"), map(max, moments), strict=True))
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
