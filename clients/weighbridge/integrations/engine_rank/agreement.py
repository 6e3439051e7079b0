"""Agreement between the ranks of an engine: a step that fails on one of them is raised on all.

A rank changes parameters, or keeps changes, only after all other ranks reported that they can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.follow.engines import attempt

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that one model is sharded over, as seen by one of them."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_object(self, mine: T) -> list[T]:
        """Gather one object from each rank, in the order of ranks; objects are pickled.

        A collective: all ranks call it, in the same order.
        """


class OneRank:
    """A model in a single process."""

    rank = 0
    size = 1

    def all_gather_object(self, mine: T) -> list[T]:
        """Return this rank's object alone."""
        return [mine]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks of a group of torch.distributed.

    Attributes:
        group: a group that gathers from host memory, such as gloo's; None for the default group.
    """

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank, from 0 within the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    def all_gather_object(self, mine: T) -> list[T]:
        """Gather one object from each rank of the group, in the order of ranks."""
        found: list[T] = [mine] * self.size
        if self.size == 1:  # a collective of one rank takes milliseconds, and each pause contains several
            return found
        dist.all_gather_object(found, mine, group=self.group)
        return found


class RanksFailed(FailedPrecondition):
    """A step failed on some rank, and every rank raises this.

    Attributes:
        errors: by rank; None for a rank on which the step succeeded.
    """

    def __init__(
        self,
        message: str,
        errors: Sequence[WeighbridgeError | None] = (),
        *,
        fix: str = "",
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(message, fix=fix, details=details or _by_rank(errors))
        self.errors = tuple(errors)


def agree(ranks: Ranks, refusal: str, step: Callable[[], T]) -> T:
    """Run a step on every rank. A collective.

    Args:
        ranks: the ranks; all of them call this.
        refusal: message of the error if the step fails on any rank.
        step: the step of this rank.

    Returns:
        Result of this rank's step.

    Raises:
        RanksFailed: the step failed on some rank; `details` says on which, and why.
    """
    value, error = attempt(step)
    errors = ranks.all_gather_object(error)
    if any(errors):
        raise RanksFailed(refusal, errors) from error
    return value  # type: ignore[return-value]  # there is one without an error


def exchange(ranks: Ranks, refusal: str, step: Callable[[], T]) -> list[T]:
    """Run a step on every rank, as `agree` does, and send its results to all ranks. A collective.

    Returns:
        Results of all ranks, in the order of ranks; they are pickled.

    Raises:
        RanksFailed: the step failed on some rank; `details` says on which, and why.
    """
    value, error = attempt(step)
    found = ranks.all_gather_object((value, error))
    errors = [each for _, each in found]
    if any(errors):
        raise RanksFailed(refusal, errors) from error
    return [each for each, _ in found]  # type: ignore[misc]  # there is one without an error


def from_first(ranks: Ranks, ask: Callable[[], T]) -> T:
    """Give all ranks the result of rank 0, because a ref may move between their calls. A collective.

    Raises:
        WeighbridgeError: the error that rank 0 raised, on all ranks.
    """
    value, error = ranks.all_gather_object(attempt(ask) if ranks.rank == 0 else (None, None))[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # there is one without an error


def _by_rank(errors: Sequence[WeighbridgeError | None]) -> list[str]:
    """One line for each failed rank, or one for all of them."""
    said = {rank: str(error) for rank, error in enumerate(errors) if error is not None}
    if len(said) == len(errors) and len(set(said.values())) == 1:
        return [f"all ranks: {said[0]}" if len(errors) > 1 else said[0]]
    return [f"rank {rank}: {text}" for rank, text in said.items()]
