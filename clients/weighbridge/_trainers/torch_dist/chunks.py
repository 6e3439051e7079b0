"""Chunks into which the tensors of a checkpoint are divided. Each chunk is a run of the tensor's bytes, and all chunks
in order form the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard, TensorSpec
from weighbridge.errors import InvalidArgument

MAX_CHUNK_BYTES = 64 << 20
"""Maximum size of a chunk. If a loading rank needs a part of a chunk, it reads the whole chunk."""


def chunks_of(spec: TensorSpec, max_bytes: int = MAX_CHUNK_BYTES) -> Iterator[Shard]:
    """Yield the chunks of a tensor, in row-major order.

    Args:
        spec: the tensor.
        max_bytes: maximum size of a chunk. A chunk of a single element may be larger.

    Raises:
        InvalidArgument: ``max_bytes`` is not positive.
    """
    if max_bytes <= 0:
        raise InvalidArgument(f"the largest chunk must be positive, not {max_bytes}")
    shape = spec.shape
    if not shape or spec.nbytes <= max_bytes:
        yield Shard(spec.name, Box.whole(shape))
        return
    # the first axis along which single indexes are small enough is divided into runs, earlier axes into single indexes
    sizes = [math.prod(shape[axis + 1 :]) * spec.dtype.itemsize for axis in range(len(shape))]
    cut = next((axis for axis, size in enumerate(sizes) if size <= max_bytes), len(shape) - 1)
    at_once = max(max_bytes // sizes[cut], 1)
    rest = shape[cut + 1 :]
    for run in range(math.prod(shape[:cut])):
        leading = []
        for extent in reversed(shape[:cut]):
            run, index = divmod(run, extent)
            leading.append(index)
        for first in range(0, shape[cut], at_once):
            offset = (first, *(0 for _ in rest))
            extent_here = (min(at_once, shape[cut] - first), *rest)
            yield Shard(spec.name, Box(offset, extent_here).under(tuple(reversed(leading))))
