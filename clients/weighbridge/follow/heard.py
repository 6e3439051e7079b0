"""Answers of all workers behind one vLLM server: whether each worker of each engine is among them. Pure.

A server with data parallelism has several engines, and vLLM answers for the first one alone. Where weighbridge's plug-in is in the server it
answers for all, and each worker says which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weighbridge.errors import FailedPrecondition
from weighbridge.follow.status import Status

Answers = Sequence[Mapping[str, Any]]
"""JSON of workers: a `Status` each, with ``failed``, ``engine``, ``rank``, ``ranks`` (of that engine), ``group`` (of ranks that agree) and
``engines`` (behind the server)."""


def check_done(answers: Answers) -> None:
    """Raise what workers say that they could not do.

    Raises:
        FailedPrecondition: names the engine, where there are several.
    """
    several = has_several(answers)
    said = {
        f"engine {each.get('engine', 0)}: {each['failed']}" if several else each["failed"]: None
        for each in answers
        if each["failed"]
    }
    problems = list(said)
    if problems:
        raise FailedPrecondition(problems[0], details=problems[1:])


def by_name(answers: Answers, count_workers: Callable[[], int | None]) -> dict[str, Status]:
    """The workers' statuses, by what errors call each worker, if all have answered.

    Args:
        answers: that a server has given.
        count_workers: gives how many workers the server says that it has, if it does. Called if its answers do not say how many engines it has.

    Raises:
        FailedPrecondition: workers are missing, or some agree with workers that this server does not reach; says what to do.
    """
    expected = _expected(answers) or count_workers()
    places = [(int(each.get("engine", 0)), int(each.get("rank", at))) for at, each in enumerate(answers)]
    if not answers or expected != len(answers) or len(set(places)) != len(places):
        raise FailedPrecondition(
            f"{len(answers)} of {expected or 'an unknown number of'} workers of this server have answered, so that the others may serve another version",
            fix="install this release of weighbridge where vLLM's API server runs, too (VLLM_PLUGINS must not leave it out, VLLM_USE_RUST_FRONTEND "
            "must not replace it), and start it again; or start one server for each engine, with an agent beside each",
        )
    group = max(int(each.get("group", 0)) for each in answers)
    if group > len(answers):
        raise FailedPrecondition(
            f"the workers of this server are {len(answers)} of {group} that take a version together, and the others are behind other servers",
            fix="start vLLM with one server for all engines: without --data-parallel-external-lb, --data-parallel-hybrid-lb and --data-parallel-rank",
        )
    several = has_several(answers)
    return {
        f"engine {engine}, rank {rank}" if several else f"rank {rank}": Status.from_json(each)
        for (engine, rank), each in zip(places, answers, strict=True)
    }


def has_several(answers: Answers) -> bool:
    """Test whether they come from a server of several engines."""
    return any(int(each.get("engines", 1)) > 1 for each in answers)


def _expected(answers: Answers) -> int:
    """Number of workers by the answers themselves; 0 if they do not say it."""
    first = answers[0] if answers else {}
    return int(first.get("engines", 0)) * int(first.get("ranks", 0))
