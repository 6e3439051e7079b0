"""Data plane of one push: fills the image from gRPC streams and from processes that were granted the image.

Pieces arrive in any order and on many threads. Each piece is copied once, directly to its final place. While a thread
holds the lock, it only claims ranges and counts bytes; it does not copy, send or post. The state machine gets coarse
events.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from weighbridge._core.range_set import RangeSet
from weighbridge._transport import rpc
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    WeighbridgeError,
)
from weighbridge_service.plan.declarations import Agreement, Home
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.plan.transfers import Bytes
from weighbridge_service.push.filling.arrivals import Arrivals
from weighbridge_service.push.filling.sample import MOST, MOST_BYTES, Sample
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.rank_progress import Received
from weighbridge_storage.memory.images import Image, ImageHold
from weighbridge_storage.stores.objects import ByteArray

Pieces = Iterator[tuple[int, memoryview, int]]
"""Pieces of a stream: byte offset, data and checksum of each."""

_NAMED = 20


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """Grant of the image to the process of a rank, which writes the grantable part of its stream to it.

    Attributes:
        rank: the rank.
        image: the image that its process writes to.
        prepared: the plan, which places the bytes of its stream.
        hold: keeps the image from being reused; `ImageWriter.end_grant` releases it.
        writer: the writer that has granted it.
    """

    rank: int
    image: Image
    prepared: PreparedPush
    hold: ImageHold
    writer: ImageWriter


class ImageWriter:
    """Writer that fills the image of one version. Thread-safe.

    A file whose bytes have all arrived counts as filled only when other processes can no longer write to it. While
    memory is granted, may be granted to a further rank, or is in doubt (`Region.may_change`), a process could still
    change the file. So if memory was ever granted, files count as filled only when the bytes of all files have arrived.

    Other processes may read tensors earlier, through `arrivals`. Bytes are in place when this writer has copied them,
    or when a process that was granted the image reports them. Marks are revoked before anything may write to bytes that
    are in place.

    Args:
        name: name of the version, for messages.
        agreed: the agreement, with the shards that each rank pushes and the place of every byte.
        home: this replica.
        image: image of the files that this replica assembles, with their headers written.
        post: queues events for the state machine.
    """

    def __init__(
        self,
        name: str,
        agreed: Agreement,
        home: Home,
        image: Image,
        post: Callable[[Sequence[on.Event]], None],
    ) -> None:
        self._name = name
        self._agreed = agreed
        self._home = home
        self._image = image
        self._post = post
        self._lock = threading.Lock()
        share = agreed.share_of(home)
        self._ranks = share.ranks
        self._lengths = {rank: stream.nbytes for rank, stream in agreed.prepared.streams.items()}
        self._meant = {rank: agreed.routes(rank).get(home, RangeSet()) for rank in self._lengths}
        self._received = {rank: RangeSet() for rank in self._lengths}
        self._in_place = {rank: RangeSet() for rank in self._lengths}
        self._arrivals: Arrivals | None = None
        self._may_be_rewritten = False
        self._placed: Counter[int] = Counter()
        self._to_come = dict(share.files)
        self._whole = [file for file, nbytes in share.files.items() if not nbytes]
        self._incomplete = sum(nbytes > 0 for nbytes in share.files.values())
        self._filled = False
        self._grants: Counter[int] = Counter()
        self._was_granted = False
        self._sealed: set[int] = set()
        self._closed: WeighbridgeError | None = None
        self._complete = False
        self._writers = 0
        self._sample = Sample()
        self._received_bytes = 0
        self._has_begun = False
        self._heard_at = time.monotonic()
        self._hold = image.hold()
        self._buffers: Mapping[str, Bytes] = image.buffers

    def begin(self) -> None:
        """Post the events that are due before any byte arrives: files and streams without bytes are complete."""
        with self._lock:
            events: list[on.Event] = [on.RankWhole(rank) for rank in sorted(self._ranks) if not self._meant[rank].size]
            events += self._show()
        self._post(events)

    # --- pieces

    def take(self, rank: int, pieces: Pieces, count: Callable[[int], None]) -> int:
        """Write the pieces of one call; see `write`. Returns the number of bytes written.

        Args:
            rank: the rank that sent the pieces.
            pieces: byte offset, data and checksum of each.
            count: called with the number of bytes of each piece that was written.
        """
        return _each(pieces, partial(self.write, rank), count)

    def take_of_other(self, claim: str, rank: int, pieces: Pieces, count: Callable[[int], None]) -> int:
        """Write the pieces of one call; see `write_of_other`. Returns the number of bytes written."""
        return _each(pieces, partial(self.write_of_other, claim, rank), count)

    def write(self, rank: int, offset: int, data: memoryview, checksum: int) -> None:
        """Write a piece of a stream from a rank of this replica. Ranges that have arrived before are not written again.

        Raises:
            DataLoss: the piece does not match its checksum; send it again.
            InvalidArgument: the piece lies outside of the stream.
            FailedPrecondition: the rank or the version is sealed, or the piece belongs to another replica.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        self._take(rank, offset, data, checksum, own=True)

    def write_of_other(self, claim: str, rank: int, offset: int, data: memoryview, checksum: int) -> None:
        """Write a piece of a stream from a rank of another replica.

        A piece that arrives after the version is complete is ignored.

        Raises:
            DataLoss, InvalidArgument: as `write`.
            FailedPrecondition: the replicas have not agreed on the same plan, the piece belongs to another replica, or
                the rank has declared at this one.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        # only the sender gets these errors: a wrong call of one process must not end the version
        self._agreed.check_claim(claim)
        if rank in self._ranks:
            raise FailedPrecondition(f"rank {rank} of {self._name} has declared at this replica")
        self._take(rank, offset, data, checksum, own=False)

    def _take(self, rank: int, offset: int, data: memoryview, checksum: int, *, own: bool) -> None:
        if rpc.checksum(data) != checksum:
            raise DataLoss(f"{self._name}, rank {rank}: the piece at byte {offset} does not agree with its checksum")
        end, length = offset + len(data), self._lengths[rank]
        if end > length:
            raise InvalidArgument(
                f"{self._name}, rank {rank}: bytes {offset} to {end} are outside of its stream of {length} bytes"
            )
        if not self._meant[rank].covers(offset, end):
            raise FailedPrecondition(
                (
                    f"{self._name}, rank {rank}: bytes {offset} to {end} do not belong to files of "
                    f"the replica {self._home}"
                ),
                fix="push each part of the stream to the replica that the response to the declaration names",
            )
        with self._lock:
            if own:
                self._check_unsealed(rank)
            # this call claims the ranges before it copies them, so that no other thread copies and counts them again
            fresh = self._claim(rank, offset, end)
            if not fresh:
                return
            # ranges that a process with a grant may have written, or may still write
            written = self._agreed.prepared.grantable[rank] if self._grants[rank] else self._in_place[rank]
            if any(written.within(start, stop) for start, stop in fresh):
                self._revoke()
            self._writers += 1
            buffers = self._buffers
            begun = self._begun()
        self._post(begun)
        filled: list[Mapping[str, int]] = []
        try:
            transfer, stream = self._agreed.prepared.transfer, str(rank)
            for start, stop in fresh:
                piece = data[start - offset : stop - offset]
                filled.append(transfer.scatter(piece, start, buffers, stream))
        except BaseException as error:
            self._post(self._leave(rank, [], []))
            lost = f"bytes that arrived for {self._name} could not be placed: {error!r}"
            self._post([on.Broken(WeighbridgeError(lost))])
            raise
        if fresh[0] == (offset, end):
            self._sample.offer(rank, offset, end, checksum)
        self._post(self._leave(rank, fresh, filled))

    def _check_unsealed(self, rank: int) -> None:
        """Raise if a rank may push nothing more. The caller holds the lock."""
        if self._complete:
            raise FailedPrecondition(f"{self._name} is sealed", fix="push a new version: another step or run")
        if rank in self._sealed:
            raise FailedPrecondition(f"rank {rank} of {self._name} is sealed")

    def _claim(self, rank: int, start: int, end: int) -> list[tuple[int, int]]:
        """Mark a range as received. Returns the parts of it that were not. The caller holds the lock."""
        self._heard_at = time.monotonic()
        if self._closed is not None:
            raise self._closed.anew()
        fresh = self._received[rank].claim(start, end)
        for begin, until in fresh:
            self._received_bytes += until - begin
        return fresh

    def _leave(
        self, rank: int, fresh: Sequence[tuple[int, int]], filled: Sequence[Mapping[str, int]]
    ) -> list[on.Event]:
        """Count the copied bytes. Returns the events that follow from them."""
        with self._lock:
            self._writers -= 1
            events = self._count(rank, fresh, filled)
            release = not self._writers and (self._closed is not None or self._complete)
        if release:
            self._hold.release()
        return events

    # --- bookkeeping; the lock is held

    def _begun(self) -> list[on.Event]:
        """`FirstByte` on the first call, no event afterwards."""
        if self._has_begun:
            return []
        self._has_begun = True
        return [on.FirstByte()]

    def _count(
        self, rank: int, fresh: Sequence[tuple[int, int]], filled: Sequence[Mapping[str, int]]
    ) -> list[on.Event]:
        events: list[on.Event] = []
        for start, stop in fresh:
            self._placed[rank] += stop - start
            self._place(rank, start, stop)
        if fresh and rank in self._ranks and self._placed[rank] == self._meant[rank].size:
            events.append(on.RankWhole(rank))
        whole = False
        for counts in filled:
            for file, nbytes in counts.items():
                if file in self._to_come:
                    self._to_come[file] -= nbytes
                    if not self._to_come[file]:
                        self._whole.append(file)
                        self._incomplete -= 1
                        whole = True
        # FilesFilled or MemoryMapped comes before RankWhole, so that the last rank waits until no process can write to
        # the image
        return [*self._show(), *events] if whole else events

    def _show(self) -> list[on.Event]:
        """`FilesFilled` with the files that are filled now; `MemoryMapped` if they only wait for a process that may
        still write to them.
        """
        if not self._whole or (self._was_granted and self._incomplete) or any(self._grants.values()):
            return []
        if self._image.region.may_change():
            return [] if self._incomplete else [on.MemoryMapped()]
        files, self._whole = frozenset(self._whole), []
        self._filled = True
        return [on.FilesFilled(files)]

    def _place(self, rank: int, start: int, stop: int) -> None:
        """Mark bytes of a rank's stream as in place."""
        for begin, end in self._in_place[rank].claim(start, stop):
            if self._arrivals is not None:
                self._arrivals.add(str(rank), begin, end, partial(self._is_in_place, rank))

    def _is_in_place(self, rank: int, start: int, stop: int) -> bool:
        """Whether all bytes of a range of a rank's stream that belong to this replica are in place."""
        meant = self._meant[rank].within(start, stop)
        return all(self._in_place[rank].covers(*each) for each in meant)

    def _revoke(self) -> None:
        """Revoke the marks: bytes that are in place may be written again from now on."""
        self._may_be_rewritten = True
        if self._arrivals is not None:
            self._arrivals.revoke()

    # --- before all bytes have arrived

    def arrivals(self) -> Arrivals:
        """Marks of the tensors that are in place. They are updated as bytes arrive, and all readers share them.

        All files have to be in the image.

        Raises:
            FailedPrecondition: all bytes have arrived, or bytes that had arrived may be written again.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        made = self._arrivals or Arrivals(self._agreed.prepared.transfer, map(str, self._lengths))
        with self._lock:
            if self._closed is not None:
                raise self._closed.anew()
            if self._complete:
                raise FailedPrecondition(f"{self._name} is complete", fix="pull it as soon as it is ready")
            if self._may_be_rewritten:
                raise FailedPrecondition(f"bytes of {self._name} that had arrived may be written again")
            if self._arrivals is None:
                self._arrivals = made
                for rank, ranges in self._in_place.items():
                    for start, stop in ranges:
                        made.add(str(rank), start, stop, partial(self._is_in_place, rank))
            return self._arrivals

    def report(self, grant: MemoryGrant, ranges: Sequence[tuple[int, int]]) -> None:
        """Record ranges that a rank's process has written and does not write again.

        Does nothing if the grant has ended.
        """
        rank, granted = grant.rank, grant.prepared.grantable[grant.rank]
        begun: list[on.Event] = []
        with self._lock:
            if self._closed is None and not self._complete and self._grants[rank]:
                self._heard_at = time.monotonic()
                for start, stop in ranges:
                    for begin, end in granted.within(start, stop):
                        begun += self._begun()
                        self._place(rank, begin, end)
        self._post(begun)

    # --- grants

    def grant(self, rank: int) -> MemoryGrant:
        """Grant the image to a rank's process, which then writes its stream to it directly.

        Raises:
            FailedPrecondition: all of the stream has arrived, files are filled already and must not change, or none of
                the rank's bytes belongs to this replica alone.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed.anew()
            if self._received[rank].size == self._meant[rank].size:
                raise FailedPrecondition(f"all bytes of rank {rank} of {self._name} have arrived")
            if not self._agreed.prepared.grantable[rank].size:
                raise FailedPrecondition(
                    f"no byte of rank {rank} of {self._name} belongs only to files that this replica assembles"
                )
            if self._filled:
                raise FailedPrecondition("files of the version are complete already, and must not be changed")
            # a received piece may still be being copied; it is marked as in place after the copy
            come = (self._received[rank], self._in_place[rank])
            granted = self._agreed.prepared.grantable[rank]
            again = any(there.within(*each) for there in come for each in granted)
            if again or self._grants[rank]:
                self._revoke()
            hold = self._image.hold()
            self._grants[rank] += 1
            self._was_granted = True
            self._heard_at = time.monotonic()
        return MemoryGrant(rank, self._image, self._agreed.prepared, hold, self)

    def end_grant(self, grant: MemoryGrant, *, complete: bool, sample: Sequence[tuple[int, int, int]] = ()) -> int:
        """End a grant: the rank's process has finished or is gone.

        If it is gone, the region is already marked as in doubt.

        Args:
            grant: the grant.
            complete: whether the process has written the whole grantable part of its stream; otherwise none of it
                counts.
            sample: ranges that it has written, with the checksums of their bytes before the copy. Ranges that are not
                granted, or too long, are ignored.

        Returns:
            Number of bytes that the process has written; 0 if not complete.

        Raises:
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        rank, granted = grant.rank, grant.prepared.grantable[grant.rank]
        try:
            with self._lock:
                self._grants[rank] -= 1
                if not complete:
                    self._revoke()
                    events = self._show()
                else:
                    fresh = [each for start, stop in granted for each in self._claim(rank, start, stop)]
                    transfer, stream = self._agreed.prepared.transfer, str(rank)
                    filled = [transfer.filled(start, stop, stream) for start, stop in fresh]
                    if fresh == list(granted):
                        self._offer(rank, granted, sample)
                    events = [*(self._begun() if fresh else ()), *self._count(rank, fresh, filled)]
        finally:
            grant.hold.release()
        self._post(events)
        return granted.size if complete else 0

    def _offer(self, rank: int, granted: RangeSet, sample: Sequence[tuple[int, int, int]]) -> None:
        for start, stop, checksum in sample[:MOST]:
            if start < stop <= start + MOST_BYTES and granted.covers(start, stop):
                self._sample.offer(rank, start, stop, checksum)

    def probe(self) -> None:
        """Check whether the processes that could still write to the image have ended or unmapped it."""
        with self._lock:
            events = self._show()
        released = not any(isinstance(event, on.MemoryMapped) for event in events)
        self._post([*events, on.MemoryUnmapped()] if released else [on.MemoryStillMapped()])

    # --- received ranges

    @property
    def progress(self) -> tuple[int, float]:
        """Number of received bytes, and the time of the last activity of a rank, in seconds of the monotonic clock."""
        with self._lock:
            return self._received_bytes, self._heard_at

    @property
    def received_of_ranks(self) -> dict[int, Received]:
        """Received bytes of each rank's stream."""
        with self._lock:
            return {
                rank: Received(there.size, self._meant[rank].size, self._grants[rank] > 0)
                for rank, there in self._received.items()
            }

    def received(self, rank: int) -> tuple[list[tuple[int, int]], int]:
        """Received ranges of a rank's stream, and the length of the stream in bytes."""
        with self._lock:
            self._heard_at = time.monotonic()
            return list(self._received[rank]), self._lengths[rank]

    def missing(self, rank: int) -> list[str]:
        """Missing shards of a rank's stream, one line each; only bytes that belong to this replica count."""
        stream, meant = self._agreed.prepared.streams[rank], self._meant[rank]
        with self._lock:
            received = self._received[rank]
            return [
                f"{stream.tensors[p.shard.tensor]}: box {p.shard.box} of rank {rank}"
                for p in stream.placements
                if not all(received.covers(start, stop) for start, stop in meant.within(p.offset, p.offset + p.nbytes))
            ]

    def missing_of_all(self) -> list[str]:
        """Missing shards of all streams, one line each."""
        return [line for rank in sorted(self._lengths) for line in self.missing(rank)]

    def check_whole(self, rank: int) -> None:
        """Raise FailedPrecondition, which names the missing shards, if not all of a rank's stream has arrived."""
        with self._lock:
            whole = self._received[rank].size == self._meant[rank].size
        if not whole:
            raise FailedPrecondition(
                f"rank {rank} of {self._name} cannot be sealed: parts of its stream have not arrived",
                details=self.missing(rank)[:_NAMED],
                fix="ask for the push state and send the rest",
            )

    def compare_sample(self, files: Mapping[str, ByteArray]) -> None:
        """Compare a sample of the received pieces with the image. See `Sample.compare`."""
        self._sample.compare(self._name, self._agreed.prepared.transfer, files)

    # --- the end

    def close_stream(self, rank: int) -> None:
        """Refuse further pieces of a rank."""
        with self._lock:
            self._sealed.add(rank)

    def close(self, error: WeighbridgeError | None) -> None:
        """Accept no more bytes, and release the image once no thread copies to it any more.

        Args:
            error: the error that ranks get if they still push; None if all bytes have arrived.
        """
        with self._lock:
            self._closed, self._complete = error, error is None
            if error is not None:
                self._revoke()
            self._buffers = {}
            idle = not self._writers
        if idle:
            self._hold.release()


def _each(pieces: Pieces, write: Callable[[int, memoryview, int], None], count: Callable[[int], None]) -> int:
    total = 0
    for offset, data, checksum in pieces:
        write(offset, data, checksum)
        count(len(data))
        total += len(data)
    return total
