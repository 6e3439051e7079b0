from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Words = NDArray[np.int64]

def copy(plans: Sequence[_Words], shards: _Words, memories: _Words, into_memory: bool, threads: int) -> None:
    """Carry out packed plans, one for each shard, without the interpreter's lock; all bounds are checked before.

    Args:
        plans: see `weighbridge.native_copies.Plan`.
        shards: address and bytes of each shard.
        memories: address and bytes of each memory.
        into_memory: whether shards are copied to memories, and not the other way.
        threads: at most so many share the work.

    Raises:
        ValueError: a plan is malformed or goes beyond a region, or a copy's two sides overlap.
    """
