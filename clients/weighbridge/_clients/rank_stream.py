"""Stream of one rank's bytes. It is sent to the replicas of its routes, resumed after a failure, and sealed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Span

from weighbridge._clients.calls import push_calls
from weighbridge._clients.connection import Connection
from weighbridge._clients.push_routes import Route, without
from weighbridge._core.striping import Striping
from weighbridge._formats.push_counts import PushCounts
from weighbridge._formats.push_sources import StreamSource
from weighbridge._formats.tensor_stream import Ranges
from weighbridge._tracing import spans
from weighbridge._transport import bulk, pieces, rpc
from weighbridge.errors import ResourceExhausted, WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class RankStream:
    """Stream of a rank that has declared its layout.

    Attributes:
        connection: connection of the client.
        header: version, rank and process.
        at: address of the replica where the rank has declared.
        routes: replicas of the parts of the stream.
        counts: counts of non-finite elements.
        span: span of the push.
    """

    connection: Connection
    header: pb.PushHeader
    at: str
    routes: Sequence[Route]
    counts: PushCounts
    span: Span

    def send(self, source: StreamSource, ranges: Ranges) -> None:
        """Stream parts of the rank's bytes to their replicas. They have arrived when this returns."""
        with spans.child(self.span, "weighbridge.stream"):
            for route in self.routes:
                self._stream(source, route.within(ranges))

    def seal(self, replicas: Sequence[pb.ReplicaChecksum]) -> None:
        """Seal the rank, with the checksums of the shards that other ranks hold too."""
        sealing = push_calls.seal(self.header, replicas, nonfinite_elements=self.counts.total)
        with spans.child(self.span, "weighbridge.seal"):
            self.connection.run(sealing, at=self.at)

    def _stream(self, source: StreamSource, route: Route) -> None:
        """Stream to one replica.

        After a failure, ask the service for the bytes that have arrived, and send the others.
        """
        address = route.address or self.at
        connections = self.connection.streams_to(address)
        missing = [(start, stop) for start, stop in route.ranges if start < stop]
        patience = rpc.Patience(self.connection.retry_seconds)
        most = connections.most
        while missing:
            try:
                with rpc.translated_errors(address, self.connection.credentials):
                    bulk.send(
                        "/weighbridge.v1.CheckpointService/Push",
                        partial(_messages, route.header(self.header), source, missing, self.counts),
                        connections,
                        sum(end - start for start, end in missing),
                        most,
                    )
                return
            except WeighbridgeError as error:
                if not patience.wait_after(error):
                    raise
                if isinstance(error, ResourceExhausted):  # there may be capacity for fewer streams
                    most = max(most // 2, 1)
                before, missing = missing, self._missing(route, missing)
                if missing != before:
                    patience.renew()

    def _missing(self, route: Route, before: Ranges) -> list[tuple[int, int]]:
        """Return the ranges of a route that have not arrived; ``before`` if the route's replica is not the rank's own
        and does not respond.

        Raises:
            WeighbridgeError: the rank's own replica cannot be reached, or has marked the version as failed. In this way
                a rank also learns that another replica has ended.
        """
        received = push_calls.received
        arrived = self.connection.run(received(self.header), at=self.at)
        if route.address:
            try:
                arrived = self.connection.run(received(self.header), at=route.address, retry_seconds=0)
            except WeighbridgeError:
                return list(before)
        return without(route.ranges, arrived)


def _messages(
    header: pb.PushHeader,
    source: StreamSource,
    ranges: Sequence[tuple[int, int]],
    counts: PushCounts,
    striping: Striping,
) -> Iterator[bytes]:
    yield pb.PushRequest(header=header).SerializeToString()
    for begin, end in ranges:
        for start, stop in striping.messages(begin, end):
            data = source.read(start, stop)
            # the checksum comes first because it loads the data into the cache faster than the count does
            checksum = rpc.checksum(data)
            counts.take(start, data, source.read)
            yield pieces.encode(pb.PushRequest(offset=start, checksum=checksum), data)
