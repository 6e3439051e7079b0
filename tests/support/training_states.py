"""Training states in memory: whole tensors put together of what ranks hold, and ranks that are filled from them, box by
box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weighbridge._core.layouts import TensorSpec
from weighbridge._trainers.states.training_state import (
    RankRestore,
    RankValues,
    StoredState,
    TrainingState,
    blob_name,
    read_blob,
    without_blobs,
)


@dataclass(frozen=True)
class Whole:
    """A training state in memory.

    Attributes:
        specs: all tensors that ranks have listed.
        tensors: those of which they hold elements, whole.
    """

    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(ranks: Sequence[TrainingState]) -> Whole:
        """Put it together; boxes that several ranks hold must be equal, and all together must cover each tensor."""
        specs: dict[str, TensorSpec] = {}
        tensors: dict[str, Tensor] = {}
        covered: dict[str, Tensor] = {}
        for rank in ranks:
            for name, spec in rank.layout.tensors.items():
                assert specs.setdefault(name, spec) == spec
            for placement, tensor in zip(rank.layout.placements, rank.tensors, strict=True):
                name, box, _ = placement.shard
                if name not in tensors:
                    tensors[name] = torch.empty(specs[name].shape, dtype=specs[name].dtype.torch)
                    covered[name] = torch.zeros(specs[name].shape, dtype=torch.bool)
                where = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
                there = covered[name][where]
                if bool(there.all()):
                    assert same_bits(tensors[name][where], tensor), name
                else:
                    assert not there.any()
                    tensors[name][where] = tensor
                    covered[name][where] = True
        assert all(bool(each.all()) for each in covered.values())
        assert all(name in tensors or 0 in spec.shape for name, spec in specs.items())
        return Whole(specs, tensors)

    def values(self, rank: int) -> RankValues:
        """Values in a rank's blob."""
        return read_blob(self.tensors[blob_name(rank)], blob_name(rank))

    def fill(self, restore: RankRestore, rank: int = 0) -> int:
        """Fill a rank; returns the number of bytes that it takes."""
        filling = restore.fit(StoredState("tests/m:training@1", without_blobs(self.specs), self.values(rank).trainer))
        with torch.no_grad():
            for placement, tensor in zip(filling.layout.placements, filling.tensors, strict=True):
                name, box, _ = placement.shard
                source = self.tensors[name][tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))]
                assert (source.dtype, source.shape) == (tensor.dtype, tensor.shape)
                tensor.copy_(source)
            filling.finish()
        return filling.layout.nbytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are alike and equal, NaN too."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.array_equal(
            a.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
            b.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
    )
