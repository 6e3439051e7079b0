"""Are the pieces of a parameter where a factory places its elements, whether it gives views or copies?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from weighbridge._formats.megatron_state import ShardedEntry, sharded_tensors
from weighbridge._trainers.states.megatron_pieces import pieces_of
from weighbridge.errors import LayoutError

PARAMETER = torch.arange(48.0).view(8, 6)
WIDE = 3
"""Of how many ranks this one is the second."""


def _halves(key: str, data: Tensor, replica_id: Any, _range: Any) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(
            key, half, (0, 3, 5), (1, 1 + WIDE * turn, 2 * WIDE), replica_id=replica_id, prepend_axis_num=1
        )
        for turn, half in enumerate(data.chunk(2))
    ]


def _transposed(key: str, data: Tensor, replica_id: Any, _range: Any) -> ShardedTensor:
    turned = data.view(2, 4, 6).transpose(1, 2)
    return ShardedTensor.from_rank_offsets(key, turned, (2, 1, WIDE), replica_id=replica_id)


def _copied(key: str, data: Tensor, replica_id: Any, _range: Any) -> ShardedTensor:
    turned = data.view(2, 4, 6).transpose(1, 2).contiguous()
    return ShardedTensor.from_rank_offsets(key, turned, (2, 1, WIDE), replica_id=replica_id)


def _entry(factory: ShardedTensorFactory) -> ShardedEntry:
    [entry] = sharded_tensors({"fc1": factory}).entries
    return entry


@pytest.mark.parametrize("build", [_halves, _transposed, _copied])
def test_a_range_of_a_parameter_lies_where_the_factory_places_it(build: Callable[..., Any]) -> None:
    factory = ShardedTensorFactory("fc1", PARAMETER, build, torch.cat, (0, 0, 0))
    built = build("fc1", PARAMETER, (0, 0, 0), None)
    shards = built if isinstance(built, list) else [built]
    expected = torch.full(shards[0].global_shape, -1.0)
    for shard in shards:
        expected[shard.global_slice()] = shard.data
    for start, stop in ((0, 48), (5, 41), (13, 14), (24, 24)):
        found = torch.full_like(expected, -1)
        for piece in pieces_of(_entry(factory)):
            assert (piece.key, piece.shape) == ("fc1", tuple(expected.shape))
            for box, part in piece.parts(start, stop - start):
                where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
                found[where] = part.of(PARAMETER.view(-1)[start:stop])
        inside = (expected >= start) & (expected < stop)
        assert torch.equal(found, torch.where(inside, expected, -1.0))


def test_a_factory_that_mixes_elements_is_refused() -> None:
    def mixed(key: str, data: Tensor, replica_id: Any, _range: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data[[0, 2, 1, 3, 4, 5, 6, 7]], replica_id=replica_id)

    factory = ShardedTensorFactory("fc1", PARAMETER, mixed, torch.cat, (0, 0, 0))
    with pytest.raises(LayoutError, match="factory of fc1 does more than place"):
        pieces_of(_entry(factory))
