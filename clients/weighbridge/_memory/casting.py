"""Copies of tensors to mapped memory in another floating-point dtype.

Elements are cast in contiguous rows, never one by one: torch would give a NaN other bits then, and a push compares
samples of its tensors with the written bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import parse
from weighbridge._core.nonfinite import Encoding, encoding_of
from weighbridge._memory.copying import has_bytes, typed_views, write_tensors
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.native_copies import AddressRange, Plan, copy_natively, region_of
from weighbridge._memory.strided import ShardCopies, Uncounted, WrittenCounts

if TYPE_CHECKING:
    import torch

_HELD_BYTES = 256 << 20


def write_cast(
    shards: Iterable[tuple[torch.Tensor, torch.dtype, Sequence[ByteCopy[int]]]],
    memories: Sequence[MappedMemory],
    encodings: Sequence[Encoding | None] = (),
    held_bytes: int = _HELD_BYTES,
) -> WrittenCounts:
    """Cast shards into memory: shards in host memory while they are copied, others on their device before they are
    copied.

    The extension narrows float32 to bfloat16, and knows whether what it has narrowed is finite. Shards that torch casts
    while copying are not counted here: that would read all of them once more, and a caller that waits for the cast need
    not wait for the count.

    Args:
        shards: tensors on any device; the dtype that they are cast to; and the copies of the cast's bytes.
        memories: mapped for writing.
        encodings: encodings of the casts; casts without one, or all if none is given, are not counted.
        held_bytes: most bytes of casts that are held at a time, unless one alone is larger.

    Returns:
        Counts of the casts' elements.
    """
    found = WrittenCounts([], [])
    made: list[tuple[torch.Tensor, Sequence[ByteCopy[int]]]] = []
    of_shard: list[int] = []
    held = 0

    def write() -> None:
        counted = [encodings[index] for index in of_shard] if encodings else []
        for index, count in zip(of_shard, write_tensors(made, memories, counted), strict=True):
            found.counts[index] = count

    given = list(shards)
    done = _narrow(given, memories)
    for index, (shard, dtype, copies) in enumerate(given):
        found.counts.append(0)
        if index in done:
            continue
        if _cast_on_the_way(shard, dtype, copies, memories):
            encoding = encodings[index] if encodings else None
            found.uncounted.extend(Uncounted(index, copy, encoding) for copy in copies if encoding is not None)
            continue
        nbytes = shard.numel() * dtype.itemsize
        if held + nbytes > held_bytes:
            write()
            made, of_shard, held = [], [], 0
        made.append((shard.detach().contiguous().to(dtype), copies))
        of_shard.append(index)
        held += nbytes
    write()
    return found


def _narrow(
    shards: Sequence[tuple[torch.Tensor, torch.dtype, Sequence[ByteCopy[int]]]],
    memories: Sequence[MappedMemory],
) -> set[int]:
    """Narrow shards of float32 in host memory to bfloat16, by the extension.

    Returns the indexes of those done, whose casts are all finite.
    """
    import torch

    chosen = [
        index
        for index, (shard, dtype, _) in enumerate(shards)
        if (shard.dtype, dtype) == (torch.float32, torch.bfloat16) and has_bytes(shard)
    ]
    if not chosen or not _narrows_as_torch():
        return set()
    plans = [
        (
            AddressRange(shards[index][0].data_ptr(), shards[index][0].nbytes),
            ShardCopies.of(shards[index][2]).packed,
        )
        for index in chosen
    ]
    arrays = [memory.bytes for memory in memories]  # they also keep the mappings alive
    regions = [region_of(array, written=True) for array in arrays]
    found = _narrowed(plans, regions, torch.get_num_threads())
    if found is None:
        return set()
    return {index for index, count in zip(chosen, found, strict=True) if not count}


def _narrowed(
    plans: Sequence[tuple[AddressRange, Plan]], memories: Sequence[AddressRange], threads: int
) -> list[int] | None:
    encodings = [encoding_of(parse("bf16"))] * len(plans)
    return copy_natively(plans, memories, into_memory=True, threads=threads, encodings=encodings, narrowed=True)


@functools.cache
def _narrows_as_torch() -> bool:
    """Whether the extension exists and narrows as torch does, bit for bit: samples of a push are cast by torch."""
    import torch

    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    patterns = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lows).reshape(-1)
    values = patterns[(patterns & 0x7FFF_FFFF) < 0x7F7F_8000].view(np.float32)
    found = np.zeros(2 * len(values), np.uint8)
    whole = ShardCopies([ByteCopy((len(found),), 0, (1,), 0, 0, (1,))]).packed
    counts = _narrowed([(AddressRange(values.ctypes.data, values.nbytes), whole)], [region_of(found, written=True)], 1)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
    return counts == [0] and np.array_equal(found, expected)


def _cast_on_the_way(
    shard: torch.Tensor, dtype: torch.dtype, copies: Sequence[ByteCopy[int]], memories: Sequence[MappedMemory]
) -> bool:
    """Cast a shard in one pass. Returns False, with nothing done, if it has to be cast first."""
    if not has_bytes(shard) or any(_is_column(copy, dtype.itemsize) for copy in copies):
        return False
    flat = shard.detach().view(-1)
    views = [typed_views(copy, flat, memories[copy.file].tensor, dtype) for copy in copies]
    if None in views:
        return False
    for ours, theirs in filter(None, views):
        theirs.copy_(ours)
    return True


def _is_column(copy: ByteCopy[int], size: int) -> bool:
    """Whether a copy's elements are not adjacent."""
    return len(copy.extent) > 1 and copy.extent[-1] == size
