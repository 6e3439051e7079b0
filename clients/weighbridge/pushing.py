"""Push of a rank's shards, which goes on while the rank trains."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from weighbridge import bulk, pieces, rpc, wire
from weighbridge.errors import AlreadyExists, DeadlineExceeded, WeighbridgeError
from weighbridge.lane_loans import WriteLoan
from weighbridge.layouts import Layout
from weighbridge.local_lane import GRPC, LOCAL, MIXED
from weighbridge.push_handle import PushHandle, PushReport
from weighbridge.push_routes import Route, routes_of, without
from weighbridge.push_sources import OpenSource, ShardSource, StreamSource
from weighbridge.request_parts import parts
from weighbridge.striping import Striping
from weighbridge.tensor_stream import Ranges
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import checkpoint_service_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from weighbridge.trainer import TrainerClient

_DECLARE_SECONDS = 600.0
"""How long a rank waits for the other ranks to declare what they hold."""
_DECLARE_CALL_SECONDS = 10.0
"""How long one call waits for that before it is made again."""
_PUSHES_AT_ONCE = 2
"""Pushes of one client whose bytes may still be on their way; a further one waits."""


class Pusher:
    """Makes the pushes of one client. Thread-safe.

    Args:
        client: whose calls, lane and connections are used.
    """

    def __init__(self, client: TrainerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._running: list[PushHandle] = []
        self._slots = threading.BoundedSemaphore(_PUSHES_AT_ONCE)

    def push(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: resources_pb2.TensorSpace.ValueType,
        open_source: OpenSource,
    ) -> PushHandle:
        """Push the shards of a rank. Returns once they are copied out.

        Args:
            opening: says which version; the same of all ranks, but for the client's id.
            rank: which rank.
            layout: the shards that it holds, as one stream.
            space: to which the names of their tensors belong.
            open_source: is called once, for the bytes of the shards that this rank is to push.

        Raises:
            WeighbridgeError: as `TrainerClient.push` says.
        """
        started = time.monotonic()
        client, model = self._client, opening.model
        self._slots.acquire()
        number = 0
        delivery: _Delivery | None = None
        try:
            number = client._call(client._checkpoints.OpenVersion, opening).version.number
            header = pb.PushHeader(model=model, number=number, rank=rank, client_id=opening.client_id)
            declared = self._declare(header, layout, space)
            assigned = list(declared.assigned)
            chosen = layout.select(assigned)
            handle = PushHandle(client, model, number, chosen.nbytes)
            copying = time.monotonic()
            delivery = self._copy_out(
                header, chosen, open_source(assigned, chosen), routes_of(declared, rank)
            )
            now = time.monotonic()
            arguments = (handle, header, delivery, (now - started, now - copying))
            # not a daemon: a trainer that ends after its last push must not lose it
            threading.Thread(target=self._deliver, args=arguments, name=f"push-{model}@{number}").start()
        except BaseException as error:
            self._slots.release()
            if delivery is not None:
                delivery.give_up()
            # Without this rank the version cannot be completed: do not let the others wait for it. But a rank that
            # belongs to another process is that process's business.
            if number and not isinstance(error, AlreadyExists):
                with contextlib.suppress(WeighbridgeError):
                    client.abort(
                        model, number, f"rank {rank} gave up before it pushed anything: {error!r}"[:300]
                    )
            raise
        with self._lock:
            self._running = [h for h in self._running if not h.done] + [handle]
        return handle

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed."""
        with self._lock:
            running, self._running = self._running, []
        for handle in running:
            handle._report.exception()

    def _declare_once(self, request: pb.DeclareLayoutRequest, timeout: float) -> pb.DeclareLayoutResponse:
        return self._client._checkpoints.DeclareLayout(parts(request), timeout=timeout)

    def _declare(
        self, header: pb.PushHeader, layout: Layout, space: resources_pb2.TensorSpace.ValueType
    ) -> pb.DeclareLayoutResponse:
        """Say what the rank holds; gives what it is to push, and where."""
        client = self._client
        request = pb.DeclareLayoutRequest(
            model=header.model, number=header.number, rank=header.rank, client_id=header.client_id,
            digest=layout.digest,
        )  # fmt: skip
        give_up = time.monotonic() + _DECLARE_SECONDS
        while True:
            try:
                response = client._call(self._declare_once, request, seconds=_DECLARE_CALL_SECONDS)
            except DeadlineExceeded:  # the service is too busy to answer
                if time.monotonic() > give_up:
                    raise
                continue
            if response.layout_needed:
                request.layout.CopyFrom(wire.layout_to_proto(layout, space))
            elif response.retry_after_ms:
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"{header.model}@{header.number}: not all ranks have declared their layout",
                        details=[f"rank {rank}" for rank in response.absent_ranks],
                        fix="every rank calls push with the same step, run and world_size",
                    )
                request.ClearField("layout")  # it has arrived
                time.sleep(response.retry_after_ms / 1000 * random.uniform(0.75, 1.25))  # not all at once
            else:
                return response

    def _copy_out(
        self, header: pb.PushHeader, stream: Layout, source: ShardSource, routes: Sequence[Route]
    ) -> _Delivery:
        """Copy shards out of the trainer's tensors: to where they belong if they can be written there, to a buffer otherwise."""
        lane, why = self._client._transport.lane, ""
        loan: WriteLoan | None = None
        streamed: Sequence[tuple[int, int]] = [(0, stream.nbytes)]
        if lane.wanted and stream.nbytes:
            try:
                loan = lane.write(header.model, header.number, header.rank, stream)
                streamed = loan.streamed
            except WeighbridgeError as error:
                why = lane.refused(error, f"push of {header.model}@{header.number}")
        staged: StreamSource | None = None
        try:
            if loan is None or streamed:
                staged = source.stage(streamed)
            if loan is not None:
                loan.fill(source, stream.nbytes)
        except BaseException:
            _Delivery(loan, staged, (), 0, why).give_up()
            raise
        finally:
            if staged is not source:
                source.release()
        nbytes = stream.nbytes - sum(stop - start for start, stop in streamed)
        parts = [route.within(streamed) for route in routes]
        return _Delivery(loan, staged, parts, nbytes, why)

    def _deliver(
        self,
        handle: PushHandle,
        header: pb.PushHeader,
        delivery: _Delivery,
        costs: tuple[float, float],
    ) -> None:
        started = time.monotonic()
        try:
            if delivery.loan is not None:
                delivery.loan.end(complete=True)
            if delivery.staged is not None:
                for route in delivery.routes:
                    self._stream(header, delivery.staged, route)
            self._client._call(
                self._client._checkpoints.SealRank,
                pb.SealRankRequest(
                    model=header.model, number=header.number, rank=header.rank, client_id=header.client_id
                ),
            )
            seconds = time.monotonic() - started
            handle._report.set_result(
                PushReport(
                    *costs,
                    handle.stream_bytes,
                    seconds,
                    delivery.lane,
                    delivery.why_not_local,
                    delivery.local_bytes,
                )
            )
        except BaseException as error:  # goes to whoever waits
            handle._report.set_exception(error)
        finally:
            delivery.give_up()
            self._slots.release()

    def _stream(self, header: pb.PushHeader, source: StreamSource, route: Route) -> None:
        """Stream parts of the rank's bytes to one replica; where it breaks, ask what has arrived and go on from there."""
        client = self._client
        connections = client._transport.connections_to(route.address)
        missing = [(start, stop) for start, stop in route.ranges if start < stop]
        patience = rpc.Patience(client.retry_seconds)
        while missing:
            try:
                with rpc.translated_errors(connections.server):
                    bulk.send(
                        "/weighbridge.v1.CheckpointService/Push",
                        partial(_messages, route.header(header), source, missing),
                        connections,
                        sum(end - start for start, end in missing),
                    )
                return
            except WeighbridgeError as error:
                if not patience.wait_after(error):
                    raise
                before, missing = missing, self._missing(header, route, missing)
                if missing != before:
                    patience.renew()

    def _missing(self, header: pb.PushHeader, route: Route, before: Ranges) -> list[tuple[int, int]]:
        """What has not arrived at a replica; as before, if another one than the rank's own does not say so.

        Raises:
            WeighbridgeError: the rank's own replica has given the version up, which is how one learns of another one's end, or
                cannot be reached.
        """
        client = self._client
        request = pb.GetPushStateRequest(model=header.model, number=header.number, rank=header.rank)
        state = client._call(client._checkpoints.GetPushState, request)
        if route.address:
            channel = client._transport.connections_to(route.address).control
            stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
            try:
                with rpc.translated_errors(route.address):
                    state = stub.GetPushState(request, timeout=rpc.CALL_SECONDS)
            except WeighbridgeError:
                return list(before)
        return without(route.ranges, [(r.start, r.end) for r in state.received])


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Shards that have been copied out, on their way.

    Attributes:
        loan: the memory that they were written to; None if all go by gRPC.
        staged: a copy of what goes by gRPC; None if nothing does.
        routes: which parts of the stream go by gRPC, and where.
        local_bytes: how many were written to the memory.
        why_not_local: why they go by gRPC, if something else was wanted.
    """

    loan: WriteLoan | None
    staged: StreamSource | None
    routes: Sequence[Route]
    local_bytes: int
    why_not_local: str

    @property
    def lane(self) -> str:
        if self.loan is None:
            return GRPC
        return LOCAL if self.staged is None else MIXED

    def give_up(self) -> None:
        """Let go of everything; nothing happens to what has been delivered."""
        if self.staged is not None:
            self.staged.release()
        if self.loan is not None:
            with contextlib.suppress(WeighbridgeError):
                self.loan.end(complete=False)


def _messages(
    header: pb.PushHeader, source: StreamSource, ranges: Sequence[tuple[int, int]], striping: Striping
) -> Iterator[bytes]:
    yield pb.PushRequest(header=header).SerializeToString()
    for begin, end in ranges:
        for start, stop in striping.messages(begin, end):
            data = source.read(start, stop)
            yield pieces.encode(pb.PushRequest(offset=start, checksum=rpc.checksum(data)), data)
