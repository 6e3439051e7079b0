"""Routes of a rank's stream: the replica of the service to which each part is pushed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weighbridge._core.range_set import RangeSet
from weighbridge._formats.tensor_stream import Ranges
from weighbridge.v1 import checkpoint_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Route:
    """Parts of a rank's stream that one replica writes to its files.

    Attributes:
        address: address of the replica; empty for the replica where the rank has declared.
        claim: fencing token on which the replicas have agreed; empty if there is only one replica.
        ranges: the parts.
    """

    address: str
    claim: str
    ranges: Ranges

    def within(self, ranges: Ranges) -> Route:
        """Return the route restricted to these parts of the stream."""
        return replace(self, ranges=common(self.ranges, ranges))

    def header(self, own: pb.PushHeader) -> pb.PushHeader:
        """Return the header of a stream to this replica, derived from the header of a stream to the rank's own
        replica.
        """
        if not self.address:
            return own
        return pb.PushHeader(model=own.model, number=own.number, rank=own.rank, claim=self.claim)


def routes_of(declared: pb.DeclareLayoutResponse, rank: int) -> list[Route]:
    """Return the routes of a rank's stream.

    Ranks begin with different replicas, so that they do not all push to the same replica at the same time.

    Args:
        declared: response of the service to the rank's declaration.
        rank: number of the rank.
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
    """Return the intersection of two lists of ranges. Both lists are sorted and disjoint."""
    theirs = RangeSet(others)
    return [part for start, end in ranges for part in theirs.within(start, end)]


def without(ranges: Ranges, received: Ranges) -> list[tuple[int, int]]:
    """Return the parts of ``ranges`` that have not been received. Both lists are sorted and disjoint."""
    arrived = RangeSet(received)
    return [part for start, end in ranges for part in arrived.gaps(start, end)]
