"""Copies to mapped memory of tensors that exist only for a moment.

A tensor in host memory has been copied when `PassingWriter.write` returns. The copy of a tensor on a GPU is not waited
for on the host: later work of its device's current stream waits for it, so that the tensor may be overwritten or freed
in stream order, as torch does. So copy engines stay busy from one tensor to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.nonfinite import Encoding
from weighbridge._memory.casting import write_cast
from weighbridge._memory.copying import is_pinned, write_tensors
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.strided import Uncounted
from weighbridge._memory.tensor_counts import Screen

if TYPE_CHECKING:
    import torch

    from weighbridge._memory.cuda_copies import CopyQueue


@dataclass(frozen=True, slots=True)
class PassingShard:
    """A shard to be copied, and its target.

    Attributes:
        index: identifies it.
        tensor: on any device, its elements in row-major order of its axes.
        dtype: dtype that they are cast to, if it is another one.
        copies: copies of the cast's bytes.
        encoding: encoding of the cast's elements; None if they are not counted.
    """

    index: int
    tensor: torch.Tensor
    dtype: torch.dtype
    copies: Sequence[ByteCopy[int]]
    encoding: Encoding | None


class PassingWriter:
    """Copies shards to memory, one after another; all are copied when the context ends.

    Args:
        memories: mapped for writing.

    Attributes:
        counts: numbers of non-finite elements, by the shard's index, where above 0; complete at the end.
        uncounted: elements in memory that are still to be counted; complete at the end.
    """

    def __init__(self, memories: Sequence[MappedMemory]) -> None:
        self.counts: dict[int, int] = {}
        self.uncounted: list[Uncounted] = []
        self._memories = memories
        self._screen = Screen()
        self._queue: CopyQueue | None = None

    def write(self, shard: PassingShard) -> None:
        """Copy a shard."""
        if shard.tensor.is_cuda and is_pinned(shard.copies, self._memories) and self._begin(shard):
            return
        if shard.dtype == shard.tensor.dtype:
            found = write_tensors([(shard.tensor, shard.copies)], self._memories, [shard.encoding])
        else:
            cast = [(shard.tensor, shard.dtype, shard.copies)]
            written = write_cast(cast, self._memories, [shard.encoding])
            found = list(written.counts)
            self.uncounted += [each._replace(shard=shard.index) for each in written.uncounted]
        if found[0]:
            self.counts[shard.index] = self.counts.get(shard.index, 0) + found[0]

    def _begin(self, shard: PassingShard) -> bool:
        """Let a copy engine copy a shard. Returns False, with nothing done, if it cannot."""
        if self._queue is None:
            from weighbridge._memory.cuda_copies import CopyQueue

            self._queue = CopyQueue([memory.address for memory in self._memories])
        flat = shard.tensor.detach().contiguous().to(shard.dtype).view(-1)
        if not self._queue.write(flat, shard.copies):
            return False
        self._screen.add(shard.index, flat, shard.copies, shard.encoding)
        self._queue.precede(flat.device)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._queue is not None:
            with self._queue:  # its end waits for all copies
                pass
        if error is None:
            self.uncounted += [
                Uncounted(index, copy, encoding)
                for index, copies, encoding in self._screen.suspects()
                for copy in copies
            ]
