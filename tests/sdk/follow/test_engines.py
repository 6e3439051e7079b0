"""Does an agent read the statuses of all ranks as one engine's?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weighbridge.errors import DeadlineExceeded, FailedPrecondition
from weighbridge.follow.engines import Prepared, Serving, serving_of, wait_prepared
from weighbridge.follow.status import Status

MODEL = "acme/smol"


def served(*labels: str, broken: str = "") -> Serving:
    return serving_of(ranks(*(Status(served=label, broken=broken) for label in labels)), MODEL)


def ranks(*statuses: Status) -> dict[str, Status]:
    return {f"rank {rank}": status for rank, status in enumerate(statuses)}


def waited(*states: dict[str, Status], told: dict[str, Status] | None = None, timeout: float = 10) -> Prepared:
    """Result of waiting for version 2 when the ranks answer one of these after the other."""
    answers = iter(states)
    return wait_prepared(told or states[0], lambda: next(answers), MODEL, 2, timeout)


def test_a_status_is_read_as_it_was_written_and_what_an_engine_adds_is_left_out() -> None:
    status = Status("acme/smol@1", "acme/smol@2", "", 7, 0.5, "no", "half")
    assert Status.from_json({**status.to_json(), "failed": ""}) == status
    assert Status.from_json({}) == Status()


def test_an_engine_serves_what_all_of_its_ranks_serve() -> None:
    assert served("acme/smol@17", "acme/smol@17") == Serving(17, model=MODEL)
    assert served("acme/other@17", "acme/other@17") == Serving(None, model="acme/other")
    assert served("", "") == Serving(None)
    assert served("", "", broken="half") == Serving(None, "half")
    assert served("acme/smol@17", "acme/smol@16").broken == (
        "different versions are served: acme/smol@16 by rank 1; acme/smol@17 by rank 0"
    )
    half = served("acme/smol@17", "", broken="half").broken
    assert half == "half\ndifferent versions are served: acme/smol@17 by rank 0; no version by rank 1"


def test_a_version_is_prepared_when_all_ranks_have_it() -> None:
    coming, there = (
        Status(preparing="acme/smol@2", nbytes=5),
        Status(prepared="acme/smol@2", nbytes=5, seconds=2.0),
    )
    states = ranks(coming, coming), ranks(there, coming), ranks(there, there)
    assert waited(*states) == Prepared(10, 2.0)


def test_ranks_that_began_early_have_begun_with_the_first_and_ended_with_the_last() -> None:
    early = Status(prepared="acme/smol@2", nbytes=5, seconds=5.1, early_seconds=5.0)
    late = Status(prepared="acme/smol@2", nbytes=5, seconds=0.4)
    found = waited(ranks(early, late))
    assert (found.seconds, found.early_seconds) == pytest.approx((5.4, 5.0))


def test_a_version_that_other_ranks_have_than_those_that_were_told_is_not_prepared() -> None:
    there = Status(prepared="acme/smol@2", instance="a")
    told = ranks(there, replace(there, instance="b"))
    assert waited(told, told=told) == Prepared(0, 0.0)
    for others in (ranks(there, replace(there, instance="c")), ranks(there)):
        with pytest.raises(FailedPrecondition, match="ranks that responded are not those") as refused:
            waited(others, told=told)
        assert "router" in refused.value.fix


def test_a_rank_that_cannot_prepare_is_named() -> None:
    with pytest.raises(FailedPrecondition, match="version 2 could not be prepared\n  - rank 1: gone"):
        waited(ranks(Status(preparing="acme/smol@2"), Status(error="gone")))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Status(preparing="acme/smol@3"), "rank 1 prepares acme/smol@3, not version 2"),
        (Status(prepared="acme/smol@3"), "rank 1 prepares acme/smol@3, not version 2"),
        (Status(), "rank 1 no longer prepares version 2"),
    ],
)
def test_an_engine_that_prepares_another_version_or_none_is_not_waited_for(other: Status, said: str) -> None:
    with pytest.raises(FailedPrecondition, match=said):
        waited(ranks(Status(preparing="acme/smol@2"), other))


def test_waiting_ends() -> None:
    with pytest.raises(DeadlineExceeded, match="not prepared within 0 s"):
        waited(ranks(Status(preparing="acme/smol@2")), timeout=0)
