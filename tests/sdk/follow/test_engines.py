"""Does an agent read the statuses of all ranks as one engine's?"""

from __future__ import annotations

import pytest

from weighbridge.errors import DeadlineExceeded, FailedPrecondition
from weighbridge.follow.engines import Prepared, Serving, serving_of, wait_prepared
from weighbridge.follow.status import Status

MODEL = "acme/smol"


def served(*labels: str, broken: str = "") -> Serving:
    return serving_of([Status(served=label, broken=broken) for label in labels], MODEL)


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
        "the ranks serve different versions: acme/smol@16, acme/smol@17"
    )


def test_a_version_is_prepared_when_all_ranks_have_it() -> None:
    coming, there = (
        Status(preparing="acme/smol@2", nbytes=5),
        Status(prepared="acme/smol@2", nbytes=5, seconds=2.0),
    )
    states = iter([[coming, coming], [there, coming], [there, there]])
    assert wait_prepared(lambda: next(states), MODEL, 2, 10) == Prepared(10, 2.0)


def test_a_rank_that_cannot_prepare_is_named() -> None:
    with pytest.raises(FailedPrecondition, match="version 2 could not be prepared\n  - rank 1: gone"):
        wait_prepared(lambda: [Status(preparing="acme/smol@2"), Status(error="gone")], MODEL, 2, 10)


@pytest.mark.parametrize("other", [Status(preparing="acme/smol@3"), Status(prepared="acme/smol@3"), Status()])
def test_an_engine_that_was_asked_for_another_version_meanwhile_is_not_waited_for(other: Status) -> None:
    with pytest.raises(FailedPrecondition, match="someone else has asked this engine"):
        wait_prepared(lambda: [Status(preparing="acme/smol@2"), other], MODEL, 2, 10)


def test_waiting_ends() -> None:
    with pytest.raises(DeadlineExceeded, match="not prepared within 0 s"):
        wait_prepared(lambda: [Status(preparing="acme/smol@2")], MODEL, 2, 0)
