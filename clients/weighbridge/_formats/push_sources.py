"""Sources of the bytes of a rank's stream while it is being pushed."""

from __future__ import annotations

import bisect
import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from weighbridge._core import dtypes
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement
from weighbridge._formats.push_counts import encodings_of
from weighbridge._formats.shifts import NO_SHIFTS, Shifts, shifted
from weighbridge._formats.tensor_stream import (
    Ranges,
    cast_of,
    check_size,
    copy_out,
    with_shift,
)
from weighbridge._memory.casting import write_cast
from weighbridge._memory.copying import write_tensors
from weighbridge._memory.file_reads import OpenFile
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.strided import Uncounted, WrittenCounts, write_bytes
from weighbridge._transport.pieces import Buffer

if TYPE_CHECKING:
    import torch

__all__ = ["HeldShards", "ShardSource", "StreamSource"]

Bytes = NDArray[np.uint8]


class HeldShards(ABC):
    """The shards that a rank holds, before it is known which of them it pushes."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def select(self, indexes: Sequence[int], stream: Layout) -> ShardSource:
        """Source of some of the shards. It may be called any number of times, also for the same shards.

        Args:
            indexes: indexes of the shards.
            stream: layout of these shards, as one stream.
        """


class ShardSource(ABC):
    """The shards that a rank pushes, at their original location.

    Used once: each of their bytes is either staged or written.

    When both are done, the shards may change.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def stage(self, ranges: Ranges) -> StreamSource:
        """Source of these parts of the shards' stream. The caller releases it separately."""

    @abstractmethod
    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts | None:
        """Copy them to memory.

        Args:
            copies: for each shard, the destinations of its bytes.
            memories: destination memories.
            on_written: called once for each shard whose bytes are completely written, with its number. It need not be
                called for all shards.

        Returns:
            Counts of the non-finite elements; None from a source that does not count them.
        """

    @abstractmethod
    def shifted(self, shifts: Shifts) -> ShardSource:
        """The same shards with constants added to their elements; used instead of this one."""

    @abstractmethod
    def release(self) -> None:
        """Release the shards, which are no longer needed."""

    @property
    def casts(self) -> tuple[int, int]:
        """Number of tensors that are cast, and number of them whose cast is exact. Both are 0 by default."""
        return 0, 0


class StreamSource(ShardSource):
    """The bytes of a stream, or of parts of it; they do not change until it is released.

    Args:
        layout: of the stream.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @abstractmethod
    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""

    def stage(self, ranges: Ranges) -> StreamSource:
        """See `ShardSource.stage`. Returns this source itself, because its bytes do not change."""
        return self

    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts:
        """See `ShardSource.write`."""
        arrays = [memory.bytes for memory in memories]
        found = []
        shards = zip(self._layout.placements, copies, encodings_of(self._layout), strict=True)
        for index, (placement, of_shard, encoding) in enumerate(shards):
            data: Buffer = b""
            if of_shard:
                data = self.read(placement.offset, placement.offset + placement.nbytes)
            found.append(write_bytes(np.frombuffer(data, np.uint8), of_shard, arrays, encoding))
            if on_written is not None and of_shard:
                on_written((index,))
        return WrittenCounts(found, [])

    def shifted(self, shifts: Shifts) -> StreamSource:
        """See `ShardSource.shifted`. Constants are added as the stream is read."""
        return _Shifted(self, self._layout, shifts)

    def release(self) -> None:
        """See `ShardSource.release`. Nothing is held by default."""


class _Shifted(StreamSource):
    """A stream with constants added to elements of some of its shards."""

    def __init__(self, source: StreamSource, layout: Layout, shifts: Shifts) -> None:
        super().__init__(layout)
        self._source = source
        self._shifts = shifts
        self._shards = [p for p in layout.placements if p.nbytes and p.shard.tensor in shifts]
        self._ends = [p.offset + p.nbytes for p in self._shards]

    def read(self, start: int, stop: int) -> Buffer:
        """See `StreamSource.read`."""
        parts: list[Buffer] = []
        at = bisect.bisect_right(self._ends, start)
        while start < stop:
            placement = self._shards[at] if at < len(self._shards) else None
            if placement is None or start < placement.offset:
                end = stop if placement is None else min(stop, placement.offset)
                parts.append(self._source.read(start, end))
            else:
                end = min(stop, self._ends[at])
                parts.append(self._part(placement, start, end))
                at += 1
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, placement: Placement, start: int, end: int) -> Buffer:
        """A range of one shard, which may begin and end inside an element."""
        dtype = self._layout.tensors[placement.shard.tensor].dtype
        begin, size = start - placement.offset, dtype.itemsize
        first, last = begin // size * size, -(-(end - placement.offset) // size) * size
        whole = self._source.read(placement.offset + first, placement.offset + last)
        data = shifted(whole, dtype, self._shifts[placement.shard.tensor])
        return data[begin - first :][: end - start].data

    def release(self) -> None:
        """See `ShardSource.release`."""
        self._source.release()


class TensorSource(ShardSource, HeldShards):
    """Shards that are tensors: those that a rank holds, and those of them that it pushes.

    A subclass with a value for each shard overrides `select`.

    Args:
        staging: makes the stream, if there is to be one.
        layout: of the stream.
        tensors: one for each of its placements, on any device, with as many elements as its box, in row-major order of
            its axes. Tensors whose floating-point dtype differs from the layout's are cast.
        shifts: what is added to elements.
    """

    def __init__(
        self,
        staging: StagingPool,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        shifts: Shifts = NO_SHIFTS,
    ) -> None:
        self._staging = staging
        self._layout = layout
        self._tensors = tensors
        self._shifts = shifts

    def select(self, indexes: Sequence[int], stream: Layout) -> Self:
        """See `HeldShards.select`."""
        made = copy.copy(self)
        made._layout, made._tensors = stream, [self._tensors[index] for index in indexes]
        return made

    def stage(self, ranges: Ranges) -> StreamSource:
        """See `ShardSource.stage`."""
        return self._staging.stage(self._layout, self._tensors, ranges, self._shifts)

    def shifted(self, shifts: Shifts) -> Self:
        """See `ShardSource.shifted`.

        Shifted tensors are computed in host memory, one at a time, and copied from there.
        """
        made = copy.copy(self)
        made._shifts = shifts
        return made

    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts:
        """See `ShardSource.write`."""
        encodings = encodings_of(self._layout)
        found = [0] * len(encodings)
        shards, casts = {}, {}
        each = zip(self._layout.placements, self._tensors, _dtypes(self._layout, self._tensors), copies, strict=True)
        for index, (placement, tensor, dtype, of_shard) in enumerate(each):
            check_size(placement, tensor, dtype)
            shift = self._shifts.get(placement.shard.tensor, 0.0)
            if of_shard and shift:
                made = with_shift(tensor, dtype, shift)
                found[index] = write_tensors([(made, of_shard)], memories, [encodings[index]])[0]
            elif of_shard and dtype == tensor.dtype:
                shards[index] = tensor, of_shard
            elif of_shard:
                casts[index] = tensor, dtype, of_shard
        indexes = list(shards)

        def on_group(group: Sequence[int]) -> None:
            if on_written is not None:
                on_written([indexes[each] for each in group])

        written = write_tensors(
            shards.values(), memories, [encodings[index] for index in indexes], on_written and on_group
        )
        cast = write_cast(casts.values(), memories, [encodings[index] for index in casts])
        for index, count in zip((*shards, *casts), (*written, *cast.counts), strict=True):
            found[index] = count
        numbers = list(casts)
        return WrittenCounts(found, [each._replace(shard=numbers[each.shard]) for each in cast.uncounted])

    @property
    def casts(self) -> tuple[int, int]:
        """See `ShardSource.casts`."""
        cast = dict(_cast_shards(self._layout, self._tensors))
        exact = [name for name, dtype in cast.items() if dtype.widens_to(self._layout.tensors[name].dtype)]
        return len(cast), len(exact)

    def release(self) -> None:
        """See `ShardSource.release`. The caller owns the tensors."""


def cast_dtypes(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[str]:
    """safetensors' names of the dtypes that tensors have and that are cast to those of a stream's layout, sorted.

    Args:
        layout: the stream.
        tensors: those of its shards, in the same order.
    """
    return sorted({dtype.name for _, dtype in _cast_shards(layout, tensors)})


def _cast_shards(layout: Layout, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, DType]]:
    """The tensors of a stream that are cast to the dtypes of its layout: name and current dtype of each shard."""
    for placement, tensor, dtype in zip(layout.placements, tensors, _dtypes(layout, tensors), strict=True):
        if dtype != tensor.dtype:
            yield placement.shard.tensor, dtypes.from_torch(tensor.dtype)


def _dtypes(layout: Layout, tensors: Sequence[torch.Tensor]) -> Sequence[torch.dtype]:
    """The dtype in which each tensor of a stream is written."""
    own = tuple(tensor.dtype for tensor in tensors)
    if own == layout.torch_dtypes:  # nearly always
        return own
    each = zip(layout.placements, own, strict=True)
    return [cast_of(layout.tensors[placement.shard.tensor], dtype) for placement, dtype in each]


class CastingSource(TensorSource):
    """Shards that are tensors and do not change while they are pushed.

    Only the part of a stream that is being read is held.

    Args:
        layout: of the stream.
        tensors: as for `TensorSource`.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(StagingPool(), layout, tensors)

    def stage(self, ranges: Ranges) -> StreamSource:
        """See `ShardSource.stage`."""
        return _Casting(self._layout, self._tensors, self._shifts)


class _Casting(StreamSource):
    """A stream that is computed as it is read."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], shifts: Shifts) -> None:
        super().__init__(layout)
        self._tensors = tensors
        self._shifts = shifts

    def read(self, start: int, stop: int) -> Buffer:
        made = np.empty(stop - start, np.uint8)
        copy_out(self._layout, self._tensors, made, [(start, stop)], self._shifts)
        return made.data


class StagingPool:
    """Staging buffers that are reused for every push. Thread-safe.

    First touch of fresh pages costs far more than the copy into them.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def stage(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        ranges: Ranges | None = None,
        shifts: Shifts = NO_SHIFTS,
    ) -> StreamSource:
        """Copy tensors to a buffer; afterwards the tensors may change.

        Args:
            layout: of the stream.
            tensors: one for each of its placements; any device.
            ranges: the parts of the stream to copy; all of it by default.
            shifts: what is added to elements.
        """
        ranges = [(0, layout.nbytes)] if ranges is None else ranges
        nbytes = sum(stop - start for start, stop in ranges)
        buffer = self.take(nbytes, pinned=any(tensor.is_cuda for tensor in tensors))
        try:
            copy_out(layout, tensors, buffer, ranges, shifts)
        except BaseException:
            self.give(buffer)
            raise
        return _Staged(layout, buffer, ranges, lambda: self.give(buffer))

    def take(self, nbytes: int, *, pinned: bool) -> Bytes:
        """A buffer of at least ``nbytes``. A new one is page-locked if GPUs copy to it."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(index)
            # buffers that are too small will not be reused: this rank's part has grown
            self._free.clear()
        if pinned:  # GPUs copy to it three times as fast as to other memory
            import torch

            made = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu", pin_memory=True)
            return np.asarray(made)
        return np.empty(max(nbytes, 1), np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer."""
        with self._lock:
            self._free.append(buffer)


class _Staged(StreamSource):
    """Parts of a stream, one after another in a buffer. Each read must lie within one of them."""

    def __init__(self, layout: Layout, buffer: Bytes, ranges: Ranges, release: Callable[[], None]) -> None:
        super().__init__(layout)
        self._buffer = buffer
        self._starts = [start for start, _ in ranges]
        self._bases = [0, *itertools.accumulate(stop - start for start, stop in ranges)]
        self._release = release

    def read(self, start: int, stop: int) -> Buffer:
        index = bisect.bisect_right(self._starts, start) - 1
        base = self._bases[index] - self._starts[index]
        return self._buffer[base + start : base + stop].data

    def release(self) -> None:
        self._release()


class MappedSource(StreamSource, HeldShards):
    """A stream whose shards are in files, each contiguous in one of them; nothing is held in memory.

    Args:
        stream: layout of the stream.
        places: for each of its placements, where its bytes lie.
        files: the files: open, or in memory.
    """

    def __init__(self, stream: Layout, places: Sequence[Placement], files: Mapping[str, Bytes | OpenFile]) -> None:
        super().__init__(stream)
        self._all_places = places
        filled = [(s, p) for s, p in zip(stream.placements, places, strict=True) if s.nbytes]
        self._starts = np.array([s.offset for s, _ in filled], np.int64)
        self._places = [p for _, p in filled]
        self._files = files

    def select(self, indexes: Sequence[int], stream: Layout) -> MappedSource:
        """See `HeldShards.select`."""
        return MappedSource(stream, [self._all_places[index] for index in indexes], self._files)

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""
        parts: list[memoryview] = []
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            place = self._places[index]
            into = start - int(self._starts[index])
            count = min(stop - start, place.nbytes - into)
            parts.append(self._files[place.buffer][place.offset + into : place.offset + into + count].data)
            start += count
            index += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts:
        """See `ShardSource.write`.

        Bytes that are contiguous in a file and in memory are read directly to their destination, and counted there.
        """
        found = super().write(
            [() if self._is_run(*each) else each[1] for each in zip(self._all_places, copies, strict=True)],
            memories,
            on_written,
        )
        uncounted = list(found.uncounted)
        shards = zip(self._all_places, copies, encodings_of(self._layout), strict=True)
        for index, (place, of_shard, encoding) in enumerate(shards):
            file = self._files[place.buffer]
            if not self._is_run(place, of_shard) or not isinstance(file, OpenFile):
                continue
            for copy_ in of_shard:
                target = memories[copy_.file].bytes[copy_.file_offset : copy_.file_end]
                file.read_into(target, place.offset + copy_.stream_offset, (1,))
                if encoding is not None:
                    uncounted.append(Uncounted(index, copy_, encoding))
            if on_written is not None and of_shard:
                on_written((index,))
        return WrittenCounts(found.counts, uncounted)

    def _is_run(self, place: Placement, copies: Sequence[ByteCopy[int]]) -> bool:
        return isinstance(self._files[place.buffer], OpenFile) and all(each.dense for each in copies)
