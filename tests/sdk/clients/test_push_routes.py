"""Do the routes of a stream say for each byte where it is pushed, and does what is missing of them miss no byte?"""

from __future__ import annotations

import random

import pytest

from weighbridge._clients.push_routes import Route, common, routes_of, without
from weighbridge.v1 import checkpoint_service_pb2 as pb

LENGTH = 60


def positions(ranges: list[tuple[int, int]]) -> set[int]:
    return {position for start, stop in ranges for position in range(start, stop)}


def random_ranges(dice: random.Random) -> list[tuple[int, int]]:
    """Sorted, disjoint and not empty; some touch."""
    cuts = sorted(dice.sample(range(LENGTH + 1), 2 * dice.randrange(8)))
    if dice.random() < 0.3 and len(cuts) > 2:
        cuts[2] = cuts[1]
    return [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b]


@pytest.mark.parametrize("seed", range(50))
def test_ranges_are_the_positions_that_they_hold(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        some, others = random_ranges(dice), random_ranges(dice)
        for found, expected in (
            (common(some, others), positions(some) & positions(others)),
            (without(some, others), positions(some) - positions(others)),
        ):
            assert positions(found) == expected
            assert found == sorted(found)
            assert sum(stop - start for start, stop in found) == len(expected), "no byte twice"


def test_without_routes_all_of_a_stream_goes_to_the_replica_that_has_answered() -> None:
    [route] = routes_of(pb.DeclareLayoutResponse(stream_bytes=LENGTH), 3)
    assert route == Route("", "", [(0, LENGTH)])
    own = pb.PushHeader(model="a/b", number=1, rank=3, client_id="me")
    assert route.header(own) is own


def test_ranks_begin_with_different_replicas_and_name_the_claim_to_others_than_their_own() -> None:
    spans = {"": (0, 10), "b:1": (10, 40), "c:1": (30, LENGTH)}
    declared = pb.DeclareLayoutResponse(stream_bytes=LENGTH, claim="agreed")
    for address, (start, end) in spans.items():
        declared.routes.add(address=address).ranges.add(start=start, end=end)
    firsts = []
    for rank in range(3):
        routes = routes_of(declared, rank)
        firsts.append(routes[0].address)
        assert {route.address: tuple(route.ranges) for route in routes} == {
            address: (span,) for address, span in spans.items()
        }
        for route in routes:
            header = route.header(pb.PushHeader(model="a/b", number=1, rank=rank, client_id="me"))
            assert (header.model, header.number, header.rank) == ("a/b", 1, rank)
            assert (header.client_id, header.claim) == (("", "agreed") if route.address else ("me", ""))
    assert sorted(firsts) == sorted(spans)
    assert routes_of(declared, 0)[1].within([(0, 20), (35, 50)]) == Route("b:1", "agreed", [(10, 20), (35, 40)])
