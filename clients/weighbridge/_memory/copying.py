"""Copies between tensors on any device and mapped memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.nonfinite import Encoding
from weighbridge._memory import cuda_copies
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.native_copies import AddressRange, copy_natively, region_of
from weighbridge._memory.strided import ShardCopies
from weighbridge._memory.tensor_counts import TensorCounts
from weighbridge.errors import WeighbridgeError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")
OnWritten: TypeAlias = "Callable[[Sequence[int]], None]"

_GROUP_BYTES = 64 << 20
"""Bytes of shards that are reported together."""
_AHEAD_BYTES = 64 << 20
"""Bytes submitted to a GPU after the shard that is waited for: some milliseconds."""
_LEAST_BYTES = 256 << 10
"""Bytes that a copy engine moves in the time that it takes to submit a shard, however small."""


def write_tensors(
    shards: Iterable[tuple[torch.Tensor, Sequence[ByteCopy[int]]]],
    memories: Sequence[MappedMemory],
    encodings: Sequence[Encoding | None] = (),
    on_written: OnWritten | None = None,
) -> list[int]:
    """Copy shards to memory: from host memory by as many threads as torch has, from GPUs by their copy engines.

    Args:
        shards: tensors on any device, their elements in row-major order of their axes, not necessarily contiguous; and
            the copies of their bytes.
        memories: mapped for writing.
        encodings: encodings of the shards' elements; shards without one, or all if none is given, are not counted.
        on_written: called with the indexes, in order, of shards that have just been copied, each once: for some 64 MB
            at a time.

    Returns:
        For each shard the number of copied elements that are non-finite; an element that goes to two places counts
        twice.
    """
    counts = TensorCounts()
    by_engine: list[_Copied] = []
    groups: _WrittenByGpus | None = None
    rest: list[_Copied] = []
    for index, (shard, copies) in enumerate(shards):
        each = _Copied(index, shard, copies, encodings[index] if encodings else None)
        (by_engine if shard.is_cuda and is_pinned(copies, memories) else rest).append(each)
    found = [0] * (len(by_engine) + len(rest))
    with contextlib.ExitStack() as stack:
        if by_engine:
            queue = stack.enter_context(cuda_copies.CopyQueue([memory.address for memory in memories]))
            groups = _WrittenByGpus(queue, on_written) if on_written else None
            for each in by_engine:
                flat = each.shard.detach().contiguous().view(-1)
                # waiting for the current stream takes as long as submitting a copy
                made = flat.data_ptr() != each.shard.data_ptr()
                if not queue.write(flat, each.copies, after_stream=made):
                    rest.append(each)
                    continue
                counts.add(each.number, flat, each.copies, each.encoding)
                if groups is not None:
                    groups.add(each.number, flat.nbytes)
        # GPUs copy and count during this
        counts.begin()
        copied = _copy_tensors(rest, memories, into_memory=True, on_written=on_written)
        if groups is not None:  # first: counts come to the host after all copies
            groups.wait()
        on_gpus = counts.take()
    for index, count in (*zip((each.number for each in rest), copied, strict=True), *on_gpus.items()):
        found[index] = count
    return found


class _WrittenByGpus:
    """Shards whose copies were submitted to GPUs, in groups, until they are done.

    Args:
        queue: queue of the copies.
        on_written: called with the indexes of each group that is copied.
    """

    def __init__(self, queue: cuda_copies.CopyQueue, on_written: OnWritten) -> None:
        self._queue = queue
        self._on_written = on_written
        self._group: list[int] = []
        self._nbytes = 0
        self._asked: deque[tuple[cuda_copies.Reached, list[int]]] = deque()

    def add(self, index: int, nbytes: int) -> None:
        """Add a shard that was given to the queue."""
        self._group.append(index)
        self._nbytes += nbytes
        if self._nbytes >= _GROUP_BYTES:
            self._close_group()
            while self._asked and self._asked[0][0].happened:
                self._on_written(self._asked.popleft()[1])

    def wait(self) -> None:
        """Wait for all groups, in order."""
        self._close_group()
        for reached, group in self._asked:
            reached.wait()
            self._on_written(group)

    def _close_group(self) -> None:
        self._asked.append((self._queue.reached(), self._group))
        self._group, self._nbytes = [], 0


class _Copied(NamedTuple):
    """A shard to be copied.

    Attributes:
        number: its index among the given shards.
        shard: the tensor.
        copies: copies between its bytes and memory.
        encoding: encoding of its elements, if they are counted.
    """

    number: int
    shard: torch.Tensor
    copies: Sequence[ByteCopy[int]]
    encoding: Encoding | None


def read_tensors(
    shards: Iterable[tuple[torch.Tensor, Sequence[ByteCopy[int]]]], memories: Sequence[MappedMemory]
) -> Generator[torch.Tensor, None, None]:
    """Fill shards, on any device, from memory, one after the other; each is complete when it is yielded.

    Copy engines of GPUs are kept busy: `_AHEAD_BYTES` after a shard are submitted before the shard is waited for. So
    shards are taken ahead of those that are yielded, except shards that share memory with one not yielded yet.

    Args:
        shards: shards to fill, and the copies of their elements; bytes without a copy become zeros.
        memories: mapped for reading.
    """
    ahead = _Ahead()
    with contextlib.ExitStack() as stack:
        queue: cuda_copies.CopyQueue | None = None
        try:
            for shard, copies in shards:
                if ahead.shares_memory_with(shard):
                    yield from ahead.given(leave=0)
                target = _contiguous(shard)
                if sum(copy.nbytes for copy in copies) < target.nbytes:
                    target.zero_()
                filled: torch.cuda.Event | None = None
                if target.is_cuda and is_pinned(copies, memories):
                    if queue is None:
                        queue = stack.enter_context(cuda_copies.CopyQueue([memory.address for memory in memories]))
                    filled = queue.read(target, copies)
                if filled is None:
                    yield from ahead.given(leave=0)
                    _copy_tensors([_Copied(0, target, copies, None)], memories, into_memory=False)
                ahead.append(_SubmittedCopy(shard, target, filled))
                yield from ahead.given(leave=_AHEAD_BYTES if filled else 0)
        except Exception:  # yield earlier shards first
            yield from ahead.given(leave=0)
            raise
        yield from ahead.given(leave=0)


def fill_tensors(
    shards: Iterable[tuple[torch.Tensor, Sequence[ByteCopy[int]]]],
    memories: Sequence[MappedMemory],
    queue: cuda_copies.CopyQueue | None = None,
) -> None:
    """Fill shards, on any device, from memory; all are complete on return.

    Unlike `read_tensors`, this waits once, for all of them.

    Args:
        shards: shards to fill, no two of which share memory, and the copies of their elements; bytes without a copy
            become zeros.
        memories: mapped for reading.
        queue: queue of copies to GPUs from these memories. Copies in it are not waited for here; the queue tells when
            they are done.
    """
    rest: list[_Copied] = []
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        for shard, copies in shards:
            target = _contiguous(shard)
            if target.data_ptr() != shard.data_ptr():
                replaced.append((shard, target))
            zeroed = sum(copy.nbytes for copy in copies) < target.nbytes
            if zeroed:
                target.zero_()
            if target.is_cuda and is_pinned(copies, memories):
                if queue is None:
                    queue = stack.enter_context(cuda_copies.CopyQueue([memory.address for memory in memories]))
                if queue.fill(target, copies, after_stream=zeroed):
                    continue
            rest.append(_Copied(0, target, copies, None))
        # GPUs copy during this
        _copy_tensors(rest, memories, into_memory=False)
    for shard, target in replaced:
        shard.detach().copy_(target)
    cuda_copies.wait_for_streams(shard for shard, _ in replaced)


class _SubmittedCopy(NamedTuple):
    """A shard whose copy was submitted.

    Attributes:
        shard: the caller's tensor.
        target: tensor that is filled: the shard, or a contiguous tensor in its place.
        filled: event of the completed copy; None if it is complete.
    """

    shard: torch.Tensor
    target: torch.Tensor
    filled: torch.cuda.Event | None

    @property
    def weight(self) -> int:
        """Bytes that the copy engine could move in the time of this shard."""
        return max(self.target.nbytes, _LEAST_BYTES)

    def finish(self) -> torch.Tensor:
        """Wait until the shard is filled."""
        if self.filled is not None:
            self.filled.synchronize()
        if self.target.data_ptr() != self.shard.data_ptr():
            self.shard.detach().copy_(self.target)
        return self.shard


class _Ahead:
    """Shards that were submitted and not yielded yet, in order."""

    def __init__(self) -> None:
        self._asked: deque[_SubmittedCopy] = deque()
        self._weight = 0

    def append(self, asked: _SubmittedCopy) -> None:
        """Add a shard."""
        self._asked.append(asked)
        self._weight += asked.weight

    def given(self, *, leave: int) -> Iterator[torch.Tensor]:
        """Yield shards as they are filled, in order, as long as at least ``leave`` bytes are submitted after the first
        one.
        """
        while self._asked and self._weight - self._asked[0].weight >= leave:
            first = self._asked.popleft()
            self._weight -= first.weight
            yield first.finish()

    def shares_memory_with(self, shard: torch.Tensor) -> bool:
        """Whether one of them shares bytes with a shard."""
        if not self._asked:
            return False
        begin, end = _bounds(shard)
        bounds = (_bounds(each.shard) for each in self._asked)
        return any(begin < other_end and other_begin < end for other_begin, other_end in bounds)


def _bounds(shard: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor's elements, and the address after the last."""
    if not shard.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(shard.shape, shard.stride(), strict=True))
    return shard.data_ptr(), shard.data_ptr() + (last + 1) * shard.element_size()


def _contiguous(shard: torch.Tensor) -> torch.Tensor:
    """The shard without its autograd history, or a new contiguous tensor like it."""
    import torch

    if shard.is_contiguous():
        return shard.detach()
    return torch.empty_like(shard, requires_grad=False, memory_format=torch.contiguous_format)


def _copy_tensors(
    shards: Sequence[_Copied],
    memories: Sequence[MappedMemory],
    *,
    into_memory: bool,
    on_written: OnWritten | None = None,
) -> list[int]:
    """Copy shards to memory or from it: shards in host memory by the extension, all others by torch.

    Returns the count of each.
    """
    import torch

    arrays = [memory.bytes for memory in memories]  # they also keep the mappings alive
    regions = [region_of(array, written=into_memory) for array in arrays]
    together: list[_Copied] = []
    others: list[_Copied] = []
    for each in shards:
        (together if has_bytes(each.shard) else others).append(each)
    # made contiguous one at a time: all together would need as much memory again
    made = ([each._replace(shard=each.shard.detach().contiguous())] for each in others)
    found: dict[int, int] = {}
    batches = [together] if on_written is None else groups_of(together, _nbytes_of, _GROUP_BYTES)
    for batch in itertools.chain(batches, made):
        counts: Iterable[int] | None = None
        if len(batch) > 1 or all(has_bytes(each.shard) for each in batch):
            plans = [
                (AddressRange(each.shard.data_ptr(), each.shard.nbytes), ShardCopies.of(each.copies).packed)
                for each in batch
            ]
            counts = copy_natively(
                plans,
                regions,
                into_memory=into_memory,
                threads=torch.get_num_threads(),
                encodings=[each.encoding for each in batch],
            )
        if counts is None:
            counts = [
                _copy_by_torch(each, each.shard.detach().view(-1), memories, into_memory=into_memory) for each in batch
            ]
        found |= zip((each.number for each in batch), counts, strict=True)
        if on_written is not None and batch:
            on_written([each.number for each in batch])
    return [found[each.number] for each in shards]


def groups_of(items: Iterable[T], nbytes_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Items in order, in groups of at least so many bytes; the last group has the rest."""
    group: list[T] = []
    nbytes = 0
    for item in items:
        group.append(item)
        nbytes += nbytes_of(item)
        if nbytes >= least:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _nbytes_of(copied: _Copied) -> int:
    return copied.shard.nbytes


def _copy_by_torch(copied: _Copied, flat: torch.Tensor, memories: Sequence[MappedMemory], *, into_memory: bool) -> int:
    """Copy a shard with these elements. Returns the number of non-finite ones."""
    for copy in copied.copies:
        ours, theirs = _views(copy, flat, memories[copy.file].tensor)
        target, source = (theirs, ours) if into_memory else (ours, theirs)
        target.copy_(source)
    counts = TensorCounts()
    counts.add(copied.number, flat, copied.copies, copied.encoding)
    return counts.take().get(copied.number, 0)


def has_bytes(shard: torch.Tensor) -> bool:
    """Whether the elements lie in host memory at the tensor's address, in their final form."""
    import torch

    known = type(shard) in (torch.Tensor, torch.nn.Parameter)  # other classes may have no memory of their own
    return known and shard.is_cpu and shard.is_contiguous() and not (shard.is_neg() or shard.is_conj())


def is_pinned(copies: Iterable[ByteCopy[int]], memories: Sequence[MappedMemory]) -> bool:
    """Whether GPUs can access all memories of these copies."""
    return all(memories[copy.file].pinned or _try_to_pin(memories[copy.file]) for copy in copies)


def _try_to_pin(memory: MappedMemory) -> bool:
    try:
        memory.pin()
    except WeighbridgeError as error:
        log.info(
            "GPUs cannot copy to and from the service's memory directly, so copies are slower: %s",
            error.message,
        )
    return memory.pinned


def _views(copy: ByteCopy[int], flat: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sides of a copy: as elements of the shard's dtype if it consists of whole ones, as bytes otherwise."""
    import torch

    whole = typed_views(copy, flat, memory, flat.dtype) if flat.element_size() > 1 else None
    return whole or _strided_views(copy, flat.view(torch.uint8), memory, torch.uint8)


def typed_views(
    copy: ByteCopy[int], flat: torch.Tensor, memory: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The two sides of a copy: the shard's own elements, and those of a dtype in memory; None if the copy or an offset
    splits an element.

    Args:
        copy: copy in bytes of the dtype on both sides.
        flat: the shard, in one dimension.
        memory: bytes of the memory.
        dtype: dtype of the elements in memory.
    """
    size = dtype.itemsize
    offsets = (copy.stream_offset, copy.file_offset + memory.data_ptr())
    strides = (*copy.stream_strides[:-1], *copy.file_strides[:-1])
    if copy.extent[-1] % size or any(n % size for n in (*offsets, *strides)):
        return None
    return _strided_views(copy, flat, memory, dtype)


def _strided_views(
    copy: ByteCopy[int], flat: torch.Tensor, memory: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    size = dtype.itemsize
    extent = (*copy.extent[:-1], copy.extent[-1] // size)
    # as_strided counts a given offset from the beginning of the storage, and the tensor may be only a part of it
    ours = flat[copy.stream_offset // size :].as_strided(extent, _in_elements(copy.stream_strides, size))
    base = memory[copy.file_offset : copy.file_end].view(dtype)
    return ours, base.as_strided(extent, _in_elements(copy.file_strides, size))


def _in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (*(stride // size for stride in strides[:-1]), 1)
