"""What one rank says, all ranks hear: nobody touches a parameter before everybody can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from weighbridge.errors import FailedPrecondition


class AllRanksFailed(FailedPrecondition):
    """Something did not work out on some rank, and every rank raises this."""


Share = Callable[[str], Sequence[str]]
"""Gives each rank's text to all ranks, in the order of ranks. All ranks have to call it."""


def share(text: str) -> list[str]:
    """Give each worker's text to all workers of this vLLM engine, over its processes' own group on CPU."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    found = [text]
    if group.world_size > 1:
        found = [""] * group.world_size
        dist.all_gather_object(found, text, group=group.cpu_group)
    return found


def all_must(what: str, problem: str, tell: Share = share) -> None:
    """Raise on every rank if any of them has a problem.

    Args:
        what: that did not work out, in words.
        problem: this rank's; empty if it has none.
        tell: how ranks hear of each other.

    Raises:
        AllRanksFailed: says which ranks had which problem.
    """
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(tell(problem)) if text]
    if problems:
        raise AllRanksFailed(what, details=problems)


@contextmanager
def one_voice() -> Iterator[None]:
    """Let only the last rank raise what all ranks have raised.

    vLLM reads its workers' answers in the order of ranks and stops at the first failure: whatever ranks behind that one have answered
    would be taken for the answer to the next call.
    """
    from vllm.distributed.parallel_state import get_world_group

    try:
        yield
    except AllRanksFailed:
        if get_world_group().is_last_rank:
            raise
