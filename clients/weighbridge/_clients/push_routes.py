"""Routes of a rank's stream: which parts of it are pushed to which replica of the service."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weighbridge._core.range_set import RangeSet
from weighbridge._formats.tensor_stream import Ranges
from weighbridge.v1 import checkpoint_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Route:
    """Parts of a rank's stream that one replica puts into its files.

    Attributes:
        address: of the replica; empty for the one where the rank has declared.
        claim: what the replicas have agreed on; empty if there is only one.
        ranges: the parts.
    """

    address: str
    claim: str
    ranges: Ranges

    def within(self, ranges: Ranges) -> Route:
        """What of it lies in these parts of the stream."""
        return replace(self, ranges=common(self.ranges, ranges))

    def header(self, own: pb.PushHeader) -> pb.PushHeader:
        """What a stream begins with there; given what one to the rank's own replica begins with."""
        if not self.address:
            return own
        return pb.PushHeader(model=own.model, number=own.number, rank=own.rank, claim=self.claim)


def routes_of(declared: pb.DeclareLayoutResponse, rank: int) -> list[Route]:
    """Where a rank's stream goes.

    Ranks begin with different replicas, so that they do not all push to the same one at one time.

    Args:
        declared: what the rank was answered.
        rank: which rank.
    """
    if not declared.routes:
        return [Route("", "", [(0, declared.stream_bytes)])]
    routes = [
        Route(route.address, declared.claim, [(each.start, each.end) for each in route.ranges])
        for route in declared.routes
    ]
    first = rank % len(routes)
    return routes[first:] + routes[:first]


def common(ranges: Ranges, others: Ranges) -> list[tuple[int, int]]:
    """What two sets of ranges have in common; each is sorted and disjoint."""
    theirs = RangeSet(others)
    return [part for start, end in ranges for part in theirs.within(start, end)]


def without(ranges: Ranges, received: Ranges) -> list[tuple[int, int]]:
    """What of some ranges has not been received; both are sorted and disjoint."""
    arrived = RangeSet(received)
    return [part for start, end in ranges for part in arrived.gaps(start, end)]
