from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Words: TypeAlias = NDArray[np.int64]

# plans: as `weighbridge._memory.native_copies.Plan`; rows: as `weighbridge._memory.byte_rows.Rows`; words: bytes of a
# word; shards, memories, parts: address and bytes of each; encodings: itemsize, mask and width of each, or empty;
# found: grows by the non-finite elements of each, or by the sum of its words; narrowed: from float32 to bfloat16
def copy(
    plans: Sequence[_Words],
    shards: _Words,
    memories: _Words,
    into_memory: bool,
    threads: int,
    encodings: _Words,
    found: _Words,
    narrowed: bool,
) -> None: ...
def count(parts: _Words, encodings: _Words, found: _Words, threads: int) -> None: ...
def ask(function: int, rows: _Words, direction: int, stream: int) -> int: ...
def add_words(rows: _Words, words: _Words, found: _Words, threads: int) -> None: ...
