"""Chunks of a rank's stream that are sent while its shards arrive, so that at most two chunks are held."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from types import TracebackType
from typing import Self

from weighbridge._core.layouts import Layout
from weighbridge._core.range_set import RangeSet
from weighbridge._formats.gathered_shards import Passing
from weighbridge._formats.push_sources import Bytes, StagingPool, StreamSource
from weighbridge._formats.tensor_stream import Ranges, copy_out
from weighbridge._transport.pieces import Buffer

_MOST_ITEM_BYTES = 16
"""Maximum bytes of an element of any dtype: chunks contain whole elements."""

Send = Callable[[StreamSource, Ranges], None]
"""Sends ranges of the stream, and returns once they have arrived."""


class PassingChunks:
    """Two alternating buffers: one is filled while the other is sent.

    A context manager; its exit waits for running sends.

    Args:
        stream: layout of the rank's shards.
        streamed: parts of it that are sent over gRPC.
        staging: pool of the buffers.
        nbytes: size of both buffers together.
        send: called in another thread, for one chunk at a time.
    """

    def __init__(self, stream: Layout, streamed: Ranges, staging: StagingPool, nbytes: int, send: Send) -> None:
        self._stream = stream
        self._streamed = RangeSet(streamed)
        self._staging = staging
        self._limit = max(nbytes // 2, 1 << 20)
        self._send = send
        self._chunk: _Chunk | None = None
        self._sending: Future[None] | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="push-chunks")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.shutdown(cancel_futures=error is not None)
        if self._chunk is not None:
            self._chunk.release()

    def take(self, passing: Passing) -> None:
        """Copy the parts of shards that are sent over gRPC. Raises the error of an earlier chunk's send."""
        part = self._stream.select(passing.indexes)
        for index, place in zip(passing.indexes, part.placements, strict=True):
            placement = self._stream.placements[index]
            moved = placement.offset - place.offset
            for start, stop in self._streamed.within(placement.offset, placement.offset + placement.nbytes):
                while start < stop:
                    chunk = self._room(any(tensor.is_cuda for tensor in passing.tensors))
                    end = min(stop, start + chunk.room)
                    into = chunk.add(start, end)
                    copy_out(part, passing.tensors, into, [(start - moved, end - moved)])
                    start = end

    def finish(self) -> None:
        """Send the rest, and wait until everything has arrived. Raises the error of a failed sending."""
        self._pass_on()
        self._wait()

    def _room(self, pinned: bool) -> _Chunk:
        """The chunk that is being filled, with space for at least one element."""
        if self._chunk is not None and self._chunk.room < _MOST_ITEM_BYTES:
            self._pass_on()
        if self._chunk is None:
            self._chunk = _Chunk(self._stream, self._staging, self._limit, pinned)
        return self._chunk

    def _pass_on(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            try:
                self._wait()
            except BaseException:
                chunk.release()
                raise
            self._sending = self._sender.submit(self._sent, chunk)

    def _sent(self, chunk: _Chunk) -> None:
        try:
            self._send(chunk, chunk.ranges)
        finally:
            chunk.release()

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()


class _Chunk(StreamSource):
    """Parts of a stream, in their order of arrival."""

    def __init__(self, stream: Layout, staging: StagingPool, limit: int, pinned: bool) -> None:
        super().__init__(stream)
        self._staging = staging
        self._buffer: Bytes = staging.take(limit, pinned=pinned)
        self._limit = limit - limit % _MOST_ITEM_BYTES
        self._used = 0
        self._parts: list[tuple[int, int, int]] = []

    @property
    def room(self) -> int:
        """Number of bytes that can be added, if the previous parts consisted of whole elements."""
        left = self._limit - self._used
        return left - left % _MOST_ITEM_BYTES

    @property
    def ranges(self) -> Ranges:
        """Ranges of the stream that the chunk holds, sorted."""
        return [(start, stop) for start, stop, _ in self._parts]

    def add(self, start: int, stop: int) -> Bytes:
        """Buffer for these bytes of the stream, for the caller to fill."""
        bisect.insort(self._parts, (start, stop, self._used))
        into = self._buffer[self._used : self._used + stop - start]
        self._used += stop - start
        return into

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""
        index = bisect.bisect_right(self._parts, start, key=itemgetter(0)) - 1
        found: list[memoryview] = []
        while start < stop:  # adjacent parts of the stream need not be adjacent here
            first, last, at = self._parts[index]
            end = min(stop, last)
            found.append(self._buffer[at + start - first : at + end - first].data)
            start, index = end, index + 1
        return found[0] if len(found) == 1 else b"".join(found)

    def release(self) -> None:
        """See `ShardSource.release`."""
        self._staging.give(self._buffer)
