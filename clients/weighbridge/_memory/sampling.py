"""Sample of a stream: parts that represent all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = 8
PIECE_BYTES = 32 << 10


def sample_of(
    nbytes: int, left_out: Sequence[tuple[int, int]], choose: random.Random | None = None
) -> list[tuple[int, int]]:
    """Random parts of a stream, sorted and disjoint, one in each of equal sections of it.

    Args:
        nbytes: length of the stream in bytes.
        left_out: parts to be left out, sorted and disjoint.
        choose: source of random numbers; by default a new one.

    Returns:
        `PIECES` ranges of `PIECE_BYTES` at most.
    """
    chance = choose or random.Random()
    there: list[tuple[int, int]] = []
    begin = 0
    for start, end in (*left_out, (nbytes, nbytes)):
        if begin < start:
            there.append((begin, start))
        begin = end
    total = sum(end - start for start, end in there)
    count = min(PIECES, -(-total // PIECE_BYTES))
    found: list[tuple[int, int]] = []
    for index in range(count):
        first, last = index * total // count, (index + 1) * total // count
        at = chance.randint(first, max(last - PIECE_BYTES, first))
        length = min(PIECE_BYTES, last - at)
        for start, end in there:
            if at < end - start:
                found.append((start + at, min(start + at + length, end)))
                break
            at -= end - start
    return found
