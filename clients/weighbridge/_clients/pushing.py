"""Push of a rank's shards, which goes on while the rank trains."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from weighbridge._clients import control_calls, push_calls
from weighbridge._clients.connection import Connection
from weighbridge._clients.delivery import Delivery, copy_out, lend, take_passing
from weighbridge._clients.push_handle import PushHandle, PushReport
from weighbridge._clients.push_options import check_heard
from weighbridge._clients.push_routes import Route, routes_of, without
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version
from weighbridge._core.striping import Striping
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import shortened
from weighbridge._formats.gathered_shards import OpenPassing
from weighbridge._formats.push_counts import PlacedPart, PushCounts
from weighbridge._formats.push_sources import OpenSource, StagingPool, StreamSource
from weighbridge._formats.replica_checksums import ReplicaChecksums
from weighbridge._formats.tensor_stream import Ranges
from weighbridge._transport import bulk, pieces, rpc
from weighbridge.errors import (
    AlreadyExists,
    InvalidArgument,
    ResourceExhausted,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.v1 import checkpoint_service_pb2 as pb

log = logging.getLogger(__name__)

_NAMED_IN_REPORT, _NAMED_IN_LOG = 20, 5
"""Most tensors with non-finite elements that are named."""
_TELL_SECONDS = 5.0
"""How long a rank that is refused tries to tell the others."""
_MOST_REASON = 400
"""Characters of a reason that the other ranks are told."""
_PUSHES_AT_ONCE = 2
"""Pushes of one client whose bytes may still be on their way; a further one waits."""


class Pusher:
    """Makes the pushes of one client. Thread-safe.

    Args:
        connection: the client's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._running: list[Future[PushReport]] = []
        self._slots = threading.BoundedSemaphore(_PUSHES_AT_ONCE)
        self._replicas = ReplicaChecksums()
        self._staging = StagingPool()

    def push(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        open_source: OpenSource | OpenPassing,
        *,
        hold_seal: bool = False,
    ) -> PushHandle:
        """Push the shards of a rank. Returns once they are copied out.

        Args:
            opening: says which version; the same of all ranks, but for the client's id.
            rank: which rank.
            layout: the shards that it holds, as one stream.
            space: to which the names of their tensors belong.
            open_source: is called for the bytes of the shards that this rank is to push; and, for those that other ranks hold, too, before
                that to compare them. Shards that pass by are held by no other rank.
            hold_seal: leave it to `PushHandle.seal` to seal the rank.

        Raises:
            WeighbridgeError: as `TrainerClient.push` says.
        """
        started = time.monotonic()
        connection, model = self._connection, opening.model
        self._slots.acquire()
        number = 0
        delivery: Delivery | None = None
        try:
            opened, at = self._open(opening)
            number = opened.number
            check_heard(opening, opened)
            header = pb.PushHeader(model=model, number=number, rank=rank, client_id=opening.client_id)
            declared = connection.run(push_calls.declare(header, layout, space), at=at)
            assigned = list(declared.assigned)
            chosen = layout.select(assigned)
            report: Future[PushReport] = Future()
            copying = time.monotonic()
            counts = PushCounts(
                chosen, [PlacedPart(each.start, each.end, each.places) for each in declared.placed]
            )
            routes = routes_of(declared, rank)
            replicas: Sequence[pb.ReplicaChecksum] = ()
            if isinstance(open_source, OpenPassing):
                passing = open_source.make(chosen)
                send = partial(self._send_all, header, at, routes, counts)
                lent = lend(connection.lane, header, chosen)
                delivery = take_passing(
                    lent, chosen, passing, send, open_source.buffer_bytes, counts, self._staging
                )
                casts = passing.casts
            else:
                replicas = self._replicas.of_push(
                    model, number, layout, declared.shared, open_source, partial(self._is_visible, model)
                )
                source = open_source(assigned, chosen)
                if declared.shifts:
                    source = source.shifted(dict(declared.shifts))
                casts = source.casts
                lent = lend(connection.lane, header, chosen)
                delivery = copy_out(lent, chosen, source, routes, counts)
            now = time.monotonic()
            seal = partial(self._seal, header, at, replicas, counts)
            arguments = (
                report,
                header,
                at,
                delivery,
                chosen.nbytes,
                (now - started, now - copying),
                casts,
                counts,
                None if hold_seal else seal,
            )
            # not a daemon: a trainer that ends after its last push must not lose it
            threading.Thread(target=self._deliver, args=arguments, name=f"push-{model}@{number}").start()
        except BaseException as error:
            self._slots.release()
            if delivery is not None:
                delivery.give_up()
            # Without this rank the version cannot be completed: do not let the others wait for it. But a rank that
            # belongs to another process is that process's business.
            if not number and isinstance(error, InvalidArgument):
                self._refuse(opening, rank, error)
            elif number and not isinstance(error, AlreadyExists):
                with contextlib.suppress(WeighbridgeError):
                    reason = _in_a_line(f"rank {rank} gave up", error)
                    connection.run(push_calls.abort(model, number, reason, refused=opening.client_id))
            raise
        with self._lock:
            self._running = [each for each in self._running if not each.done()] + [report]
        return PushHandle(connection, model, number, chosen.nbytes, report, seal if hold_seal else None)

    @contextlib.contextmanager
    def telling(self, opening: pb.OpenVersionRequest, rank: int) -> Iterator[None]:
        """Where the block refuses what a rank would push, tell the other ranks of the push, which would wait for it."""
        try:
            yield
        except Exception as error:
            self._refuse(opening, rank, error)
            raise

    def _refuse(self, opening: pb.OpenVersionRequest, rank: int, error: Exception) -> None:
        if opening.ranks < 2:
            return
        reason = _in_a_line(f"rank {rank} was refused", error)
        try:
            self._connection.run(push_calls.refuse(opening, rank, reason), retry_seconds=_TELL_SECONDS)
        except (VersionFailed, AlreadyExists):  # they have been told; the rank takes part by another process
            pass
        except WeighbridgeError as untold:
            # what is refused may be the opening: each rank learns of that by itself
            if not (isinstance(error, WeighbridgeError) and untold.message == error.message):
                log.warning("%s: the other ranks could not be told: %s", opening.model, untold.message)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed."""
        with self._lock:
            running, self._running = self._running, []
        for report in running:
            report.exception()

    def _is_visible(self, model: str, number: int) -> bool:
        with contextlib.suppress(WeighbridgeError):
            return self._connection.run(control_calls.get_version(model, number)).state.visible
        return False

    def _open(self, opening: pb.OpenVersionRequest) -> tuple[Version, str]:
        """Open a version; with the address of the replica that takes this rank's push."""
        addresses = self._connection.addresses
        at = addresses.current
        opened = self._connection.run(push_calls.open_version(opening))
        while at != addresses.current:  # another one has answered, or another thread has moved on meanwhile
            at = addresses.current
            opened = self._connection.run(push_calls.open_version(opening), at=at)
        return opened, at

    def _send_all(
        self,
        header: pb.PushHeader,
        at: str,
        routes: Sequence[Route],
        counts: PushCounts,
        source: StreamSource,
        ranges: Ranges,
    ) -> None:
        """Stream parts of the rank's bytes to where each belongs."""
        for route in routes:
            self._stream(header, at, source, route.within(ranges), counts)

    def _deliver(
        self,
        report: Future[PushReport],
        header: pb.PushHeader,
        at: str,
        delivery: Delivery,
        nbytes: int,
        costs: tuple[float, float],
        casts: tuple[int, int],
        counts: PushCounts,
        seal: Callable[[], None] | None,
    ) -> None:
        started = time.monotonic()
        try:
            if delivery.lent.loan is not None:
                counts.add(delivery.lent.loan.count())
                delivery.lent.loan.end(complete=True)
            if delivery.staged is not None:
                for route in delivery.routes:
                    self._stream(header, at, delivery.staged, route, counts)
            broken = counts.by_tensor
            if broken:
                log.warning(_told(header, broken))
            if seal is not None:
                seal()
            seconds = time.monotonic() - started
            report.set_result(
                PushReport(
                    *costs,
                    nbytes,
                    seconds,
                    delivery.lent.lane,
                    delivery.lent.why_not_local,
                    delivery.local_bytes,
                    *casts,
                    counts.total,
                    tuple(itertools.islice(broken.items(), _NAMED_IN_REPORT)),
                )
            )
        except BaseException as error:  # goes to whoever waits
            report.set_exception(error)
        finally:
            delivery.give_up()
            self._slots.release()

    def _seal(
        self, header: pb.PushHeader, at: str, replicas: Sequence[pb.ReplicaChecksum], counts: PushCounts
    ) -> None:
        self._connection.run(push_calls.seal(header, replicas, nonfinite_elements=counts.total), at=at)

    def _stream(
        self, header: pb.PushHeader, at: str, source: StreamSource, route: Route, counts: PushCounts
    ) -> None:
        """Stream parts of the rank's bytes to one replica; where it breaks, ask what has arrived and go on from there."""
        address = route.address or at
        connections = self._connection.streams_to(address)
        missing = [(start, stop) for start, stop in route.ranges if start < stop]
        patience = rpc.Patience(self._connection.retry_seconds)
        most = connections.most
        while missing:
            try:
                with rpc.translated_errors(address):
                    bulk.send(
                        "/weighbridge.v1.CheckpointService/Push",
                        partial(_messages, route.header(header), source, missing, counts),
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
                before, missing = missing, self._missing(header, at, route, missing)
                if missing != before:
                    patience.renew()

    def _missing(self, header: pb.PushHeader, at: str, route: Route, before: Ranges) -> list[tuple[int, int]]:
        """What has not arrived at a replica; as before, if another one than the rank's own does not say so.

        Raises:
            WeighbridgeError: the rank's own replica has given the version up, which is how one learns of another one's end, or
                cannot be reached.
        """
        arrived = self._connection.run(push_calls.received(header), at=at)
        if route.address:
            try:
                arrived = self._connection.run(push_calls.received(header), at=route.address, retry_seconds=0)
            except WeighbridgeError:
                return list(before)
        return without(route.ranges, arrived)


def _told(header: pb.PushHeader, broken: Mapping[str, int]) -> str:
    """What of a push is not finite."""
    named = [f"{name} ({count})" for name, count in itertools.islice(broken.items(), _NAMED_IN_LOG)]
    more = f" and {len(broken) - len(named)} more" if len(broken) > len(named) else ""
    return (
        f"{header.model}@{header.number}: rank {header.rank} pushes {counted(sum(broken.values()), 'element that is', 'elements that are')} NaN or infinite, "
        f"in {', '.join(named)}{more}"
    )


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
            checksum = rpc.checksum(
                data
            )  # first: it fetches the data into the cache faster than a count does
            counts.take(start, data, source.read)
            yield pieces.encode(pb.PushRequest(offset=start, checksum=checksum), data)


def _in_a_line(what: str, error: BaseException) -> str:
    """What is told to those who wait for a rank."""
    said = (error.message, *error.details) if isinstance(error, WeighbridgeError) else (repr(error),)
    return shortened(" ".join(f"{what}: {'; '.join(said)}".split()), _MOST_REASON)
