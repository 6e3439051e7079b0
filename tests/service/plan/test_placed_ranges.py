"""Do the parts of a stream that are said to be padding, or to lie in several places, match a count of every byte?"""

from __future__ import annotations

import random

import numpy as np

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge_service.plan.placed_ranges import placed_ranges
from weighbridge_service.plan.planning import Copy, Plan

EMPTY = Layout.stream((), ())


def test_every_byte_lies_in_as_many_places_as_copies_take_it_to() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        shapes = [tuple(chance.randint(1, 5) for _ in range(chance.randint(0, 3))) for _ in range(4)]
        specs = {str(n): TensorSpec(str(n), dtypes.parse("bf16"), shape) for n, shape in enumerate(shapes)}
        placements, starts = [], {"0": 0, "1": 0}
        for name, spec in specs.items():
            rank = chance.choice("01")
            placements.append(Placement(Shard(name, Box.whole(spec.shape)), rank, starts[rank], spec.nbytes))
            starts[rank] += spec.nbytes
        copies = []
        for index in chance.choices(range(4), k=5):
            low = [chance.randrange(n) for n in shapes[index]]
            high = [chance.randint(a, n) for a, n in zip(low, shapes[index], strict=True)]
            box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
            copies.append(Copy(index, box, 0, box, ()))
        expected = {rank: np.zeros(nbytes, int) for rank, nbytes in starts.items()}
        uneven = {name for name in specs if chance.random() < 0.8}
        for index, placement in enumerate(placements):
            places = np.zeros(shapes[index], int)
            for copy in copies:
                if copy.source == index:
                    box = copy.source_box
                    places[tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))] += 1
            if placement.shard.tensor not in uneven:
                places[...] = 1
            end = placement.offset + placement.nbytes
            expected[placement.buffer][placement.offset : end] = np.repeat(places.reshape(-1), 2)
        found = placed_ranges(Plan(Layout(specs, tuple(placements)), EMPTY, tuple(copies), ()), uneven)
        for rank, places in expected.items():
            said = np.ones_like(places)
            last = 0
            for part in found.get(int(rank), ()):
                assert last <= part.start < part.end
                last = part.end
                said[part.start : part.end] = part.places
            assert np.array_equal(said, places), seed
