"""A job of ranks that save and load by verl's checkpoint managers.

Asked over a pipe what it is to do; runs in verl's environment, with our ``tests``.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import checkpoint_ranks
import torch

from tests.support.megatron_training import wholes
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_demo.ranks import RankError, gloo_job, megatron_job, run_jobs

_PRELOAD = ("checkpoint_ranks", "verl.workers.engine", "tests.support.megatron_training")


class Job:
    """One job; its methods are the requests that it answers."""

    def train(self, kind: str, hf_dir: str, folder: str, sizes: dict[str, int]) -> str:
        """Ranks that save and are killed; how they ended."""
        try:
            _run(kind, checkpoint_ranks.train, hf_dir, folder, sizes)
        except RankError as error:
            return str(error)
        return ""

    def resume(self, kind: str, hf_dir: str, folder: str, sizes: dict[str, int], exactly: bool) -> list[str]:
        """Ranks that resume; the differences from the killed ones.

        Losses and random numbers are compared only at the same number of ranks.
        """
        found = _run(kind, checkpoint_ranks.resume, hf_dir, folder, sizes)
        paths = sorted(Path(folder).glob("saved-*"))
        saved = [torch.load(path, weights_only=False) for path in paths]
        here, there = (
            (wholes(each for each, _ in found), wholes(each for _, each, _ in saved))
            if kind == "megatron"
            else (found[0][0], saved[0][1])
        )
        differs = [name for name in here.keys() | there.keys() if not _alike(here.get(name), there.get(name))]
        if len(there) < 10:
            differs.append(f"there are {len(there)} tensors only")
        if exactly:
            differs += [
                f"rank {rank}: {mine} and {theirs}"
                for rank, ((_, mine), (_, _, theirs)) in enumerate(zip(found, saved, strict=True))
                if mine != theirs
            ]
        return sorted(differs)

    def managers(self, folder: str) -> set[str]:
        """Names of the classes that saved."""
        return {torch.load(path, weights_only=False)[0] for path in Path(folder).glob("saved-*")}


def _run(kind: str, work: Any, hf_dir: str, folder: str, sizes: dict[str, int]) -> list[Any]:
    parallel = Parallel(**sizes)
    arguments = (work, kind, hf_dir, folder, parallel)
    job = megatron_job(parallel, *arguments) if kind == "megatron" else gloo_job(parallel.world_size, *arguments)
    return run_jobs([job], timeout=300, preload=_PRELOAD)[0]


def _alike(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def main() -> None:
    """Answer until the pipe is closed."""
    job = Job()
    with Connection(int(sys.argv[1])) as link:
        while True:
            try:
                name, arguments = link.recv()
            except EOFError:
                break
            try:
                link.send((True, getattr(job, name)(**arguments)))
            except Exception as error:
                traceback.print_exc()
                link.send((False, str(error)))


if __name__ == "__main__":
    main()
