"""Where the bytes of a rank's stream come from while it is being pushed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge.lane_memory import MappedMemory
from weighbridge.layouts import Layout, Placement
from weighbridge.pieces import Buffer
from weighbridge.strided import StridedCopy, write_bytes, write_tensors
from weighbridge.tensor_stream import check_size, copy_out

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]


class ShardSource(ABC):
    """The shards that a rank is to push, where they lie. It is used once: they are either staged or written."""

    @abstractmethod
    def stage(self) -> StreamSource:
        """Their bytes as a stream; afterwards the shards may change."""

    @abstractmethod
    def write(self, copies: Sequence[Sequence[StridedCopy]], memories: Sequence[MappedMemory]) -> None:
        """Copy them to memory; afterwards they may change.

        Args:
            copies: for each shard, where its bytes go.
            memories: which memory.
        """


class StreamSource(ShardSource):
    """The bytes of a stream; they stay as they are until it is released, or was written.

    Args:
        layout: of the stream.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @abstractmethod
    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""

    def stage(self) -> StreamSource:
        """See `ShardSource.stage`. They do not change."""
        return self

    def write(self, copies: Sequence[Sequence[StridedCopy]], memories: Sequence[MappedMemory]) -> None:
        """See `ShardSource.write`."""
        arrays = [memory.bytes for memory in memories]
        try:
            for placement, of_shard in zip(self._layout.placements, copies, strict=True):
                if placement.nbytes:
                    data = self.read(placement.offset, placement.offset + placement.nbytes)
                    write_bytes(np.frombuffer(data, np.uint8), of_shard, arrays)
        finally:
            self.release()

    def release(self) -> None:
        """They are needed no more. By itself, nothing is held."""


OpenSource = Callable[[Sequence[int], Layout], ShardSource]
"""Makes the source for the shards that a rank is to push: their indexes, and their layout as a stream."""


class TensorSource(ShardSource):
    """Shards that are tensors.

    Args:
        staging: makes the stream, if there is to be one.
        layout: of the stream.
        tensors: one for each of its placements, on any device, with as many elements as its box, in row-major order of its axes.
    """

    def __init__(self, staging: StagingPool, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._staging = staging
        self._layout = layout
        self._tensors = tensors

    def stage(self) -> StreamSource:
        """See `ShardSource.stage`."""
        return self._staging.stage(self._layout, self._tensors)

    def write(self, copies: Sequence[Sequence[StridedCopy]], memories: Sequence[MappedMemory]) -> None:
        """See `ShardSource.write`."""
        shards = []
        for placement, tensor, of_shard in zip(self._layout.placements, self._tensors, copies, strict=True):
            check_size(placement, tensor)
            if placement.nbytes:
                shards.append((tensor, of_shard))
        write_tensors(shards, memories)


class StagingPool:
    """Staging buffers, used again for every push. Thread-safe.

    First touch of fresh pages costs far more than the copy into them.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def stage(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> StreamSource:
        """Copy tensors out: afterwards they may change.

        Args:
            layout: of the stream.
            tensors: one for each of its placements; any device.
        """
        buffer = self._take(layout.nbytes, pinned=any(tensor.is_cuda for tensor in tensors))
        try:
            copy_out(layout, tensors, buffer)
        except BaseException:
            self._give(buffer)
            raise
        return _Staged(layout, buffer, lambda: self._give(buffer))

    def _take(self, nbytes: int, *, pinned: bool) -> Bytes:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(index)
            # those that are too small will not be used again: this rank's part has grown
            self._free.clear()
        if pinned:  # GPUs copy to it three times as fast as to other memory
            import torch

            made: Bytes = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=True).numpy()
            return made
        return np.empty(max(nbytes, 1), np.uint8)

    def _give(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.append(buffer)


class _Staged(StreamSource):
    def __init__(self, layout: Layout, buffer: Bytes, release: Callable[[], None]) -> None:
        super().__init__(layout)
        self._buffer = buffer
        self._release = release

    def read(self, start: int, stop: int) -> Buffer:
        return self._buffer[start:stop].data

    def release(self) -> None:
        self._release()


class MappedSource(StreamSource):
    """A stream whose shards lie in mapped files, each dense in one of them; nothing is held in memory.

    Args:
        stream: layout of the stream.
        places: for each of its placements, where its bytes lie.
        files: the mapped files.
    """

    def __init__(self, stream: Layout, places: Sequence[Placement], files: Mapping[str, Bytes]) -> None:
        super().__init__(stream)
        filled = [(s, p) for s, p in zip(stream.placements, places, strict=True) if s.nbytes]
        self._starts = np.array([s.offset for s, _ in filled], np.int64)
        self._places = [p for _, p in filled]
        self._files = files

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
