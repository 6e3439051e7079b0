from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Words: TypeAlias = NDArray[np.int64]

# plans: as `weighbridge.native_copies.Plan`; shards, memories: address and bytes of each
def copy(
    plans: Sequence[_Words], shards: _Words, memories: _Words, into_memory: bool, threads: int
) -> None: ...
