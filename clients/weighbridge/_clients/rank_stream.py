"""Stream of one rank's bytes: sent to the replicas that want them, resumed where it broke, and sealed."""

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
    """Where the bytes of a rank go that has declared.

    Attributes:
        connection: the client's.
        header: which version and rank, and which process.
        at: address of the replica where the rank has declared.
        routes: which parts are pushed where.
        counts: of what is not finite.
        span: of the push.
    """

    connection: Connection
    header: pb.PushHeader
    at: str
    routes: Sequence[Route]
    counts: PushCounts
    span: Span

    def send(self, source: StreamSource, ranges: Ranges) -> None:
        """Stream parts of the rank's bytes to where each belongs; they have arrived when this returns."""
        with spans.child(self.span, "weighbridge.stream"):
            for route in self.routes:
                self._stream(source, route.within(ranges))

    def seal(self, replicas: Sequence[pb.ReplicaChecksum]) -> None:
        """Say that everything was pushed, and what the rank holds of shards that other ranks hold, too."""
        sealing = push_calls.seal(self.header, replicas, nonfinite_elements=self.counts.total)
        with spans.child(self.span, "weighbridge.seal"):
            self.connection.run(sealing, at=self.at)

    def _stream(self, source: StreamSource, route: Route) -> None:
        """Stream to one replica; where it breaks, ask what has arrived and go on from there."""
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
                if isinstance(error, ResourceExhausted):  # there may be room for some of them alone
                    most = max(most // 2, 1)
                before, missing = missing, self._missing(route, missing)
                if missing != before:
                    patience.renew()

    def _missing(self, route: Route, before: Ranges) -> list[tuple[int, int]]:
        """What has not arrived at a replica; as before, if another one than the rank's own does not say so.

        Raises:
            WeighbridgeError: the rank's own replica has given the version up, which is how one learns of another one's end, or
                cannot be reached.
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
            # first: it fetches the data into the cache faster than a count does
            checksum = rpc.checksum(data)
            counts.take(start, data, source.read)
            yield pieces.encode(pb.PushRequest(offset=start, checksum=checksum), data)
