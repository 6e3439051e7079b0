"""Comparison of two sides, piece by piece, in memory that does not grow with their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from weighbridge._comparing.differences import Comparison, Difference, Matching, TensorDifference, known_equal
from weighbridge._comparing.elements import difference
from weighbridge._comparing.sides import Side
from weighbridge._core.boxes import row_major_boxes
from weighbridge._core.layouts import Shard, TensorSpec

PIECE_BYTES = 32 << 20
"""Most bytes of a tensor that are compared at a time: of each side, one such piece is in memory, and the next one
arrives.
"""


def compare(
    before: Side,
    after: Side,
    *,
    piece_bytes: int = PIECE_BYTES,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Comparison:
    """Compare two sides. Tensors with equal digests are not read.

    Args:
        before, after: the sides.
        piece_bytes: see `PIECE_BYTES`.
        on_progress: called with the bytes of a side that are compared so far, and with their total.
    """
    matching = Matching.of(before.specs, after.specs)
    known = known_equal(matching.same, before.digests, after.digests)
    unknown = [spec for spec in matching.same if spec.name not in known]
    found = {spec.name: Difference(0) for spec in unknown}
    total = sum(spec.nbytes for spec in unknown)
    shards = [shard for spec in unknown for shard in _pieces(spec, piece_bytes)]
    done = 0
    on_progress(done, total)
    for shard, old, new in zip(shards, before.read(shards), after.read(shards), strict=True):
        part = difference(before.specs[shard.tensor].dtype, old, new)
        found[shard.tensor] = found[shard.tensor].plus(part)
        done += len(old)
        on_progress(done, total)
    return Comparison(
        before.title,
        after.title,
        tuple(
            TensorDifference(spec, found.get(spec.name, Difference(math.prod(spec.shape)))) for spec in matching.same
        ),
        matching.only_before,
        matching.only_after,
        matching.others,
        bytes_read=total,
        bytes_known=sum(spec.nbytes for spec in matching.same if spec.name in known),
    )


def _pieces(spec: TensorSpec, nbytes: int) -> Iterator[Shard]:
    """A tensor as boxes that follow each other in row-major order."""
    elements, most = math.prod(spec.shape), max(nbytes // spec.dtype.itemsize, 1)
    for start in range(0, elements, most):
        for box in row_major_boxes(spec.shape, start, min(start + most, elements)):
            yield Shard(spec.name, box)
