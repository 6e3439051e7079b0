"""Agreement between the tensor-parallel ranks of an engine: what they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from weighbridge.errors import FailedPrecondition

T = TypeVar("T")


def everybody(group: Any, mine: T) -> list[T]:
    """What each rank of a group has, in the order of the ranks.

    Args:
        group: one of SGLang's ``GroupCoordinator``s.
        mine: what this rank has; it is pickled.
    """
    found: list[T] = [mine] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


def together(group: Any, step: Callable[[], T]) -> T:
    """Let each rank of a group do a step; if one fails, all do.

    Returns:
        What the step of this rank gave.

    Raises:
        FailedPrecondition: it failed somewhere; says where and why.
    """
    result: list[T] = []
    failure = ""
    cause: Exception | None = None
    try:
        result.append(step())
    except Exception as error:  # also what an engine's loader asserts
        failure, cause = str(error) or repr(error), error
    told = everybody(group, failure)
    failed = {rank: said for rank, said in enumerate(told) if said}
    if not failed:
        return result[0]
    if len(set(failed.values())) == 1:
        message = f"{'all' if len(failed) == len(told) else f'{len(failed)} of {len(told)}'} ranks: {next(iter(failed.values()))}"
    else:
        message = "; ".join(f"rank {rank}: {said}" for rank, said in failed.items())
    raise FailedPrecondition(f"the engine keeps the weights it has; {message}") from cause


def parallel() -> Any:
    """SGLang's sizes and groups of this process."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def world() -> Any:
    """All processes of this engine's replica."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group()
