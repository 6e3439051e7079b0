"""Where the bytes of a rank's stream come from while it is being pushed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from weighbridge.layouts import Layout, Placement
from weighbridge.pieces import Buffer
from weighbridge.tensor_stream import copy_out

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]


class StreamSource(Protocol):
    """The bytes of a stream; they stay as they are until it is released."""

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""

    def release(self) -> None:
        """They are needed no more."""


OpenSource = Callable[[Sequence[int], Layout], StreamSource]
"""Makes the source for the shards that a rank is to push: their indexes, and their layout as a stream."""


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
        buffer = self._take(layout.nbytes)
        try:
            copy_out(layout, tensors, buffer)
        except BaseException:
            self._give(buffer)
            raise
        return _Staged(buffer, lambda: self._give(buffer))

    def _take(self, nbytes: int) -> Bytes:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(index)
            # those that are too small will not be used again: this rank's part has grown
            self._free.clear()
        return np.empty(max(nbytes, 1), np.uint8)

    def _give(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.append(buffer)


class _Staged:
    def __init__(self, buffer: Bytes, release: Callable[[], None]) -> None:
        self._buffer = buffer
        self._release = release

    def read(self, start: int, stop: int) -> Buffer:
        return self._buffer[start:stop].data

    def release(self) -> None:
        self._release()


class MappedSource:
    """A stream whose shards lie in mapped files, each dense in one of them; nothing is held in memory.

    Args:
        stream: layout of the stream.
        places: for each of its placements, where its bytes lie.
        files: the mapped files.
    """

    def __init__(self, stream: Layout, places: Sequence[Placement], files: Mapping[str, Bytes]) -> None:
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

    def release(self) -> None:
        """Nothing is held."""
