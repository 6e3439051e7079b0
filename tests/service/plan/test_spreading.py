"""Does every byte of a push over several replicas get to the replica that owns its file, exactly once, by one lane?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.raw_clients import tiny_config_json
from tests.support.reference import tiny_config
from weighbridge._core import dtypes
from weighbridge._core.range_set import RangeSet
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_files
from weighbridge._lane.plans import placed_copies
from weighbridge._memory.strided import write_bytes
from weighbridge_service.api.lane.plans import plan_to_proto
from weighbridge_service.models.bridges import Bridge, bridge_for
from weighbridge_service.models.megatron_layouts import Stages, all_ranks
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.weight_maps import derive_weight_map
from weighbridge_service.plan.push_plan import PreparedPush, prepare_push

FILE_BYTES = 12_000
"""So small that the parts of a fused matrix lie in several files."""


def bridge_of(family: str) -> Bridge:
    if family == "tiny":
        return bridge_for(tiny_config_json())
    return bridge_for(str(tiny_config(family, tied=False).to_json_string()).encode())


def prepared_for(
    bridge: Bridge, homes: Sequence[int], max_file_bytes: int = FILE_BYTES, **parallel: Any
) -> tuple[PreparedPush, FilesLayout]:
    tensors = ModelTensors(dtypes.parse("fp32")).specs(bridge)
    files = lay_out_files(list(tensors.values()), max_shard_bytes=max_file_bytes)
    stages = Stages.spread(bridge.num_layers, parallel["pp"])
    layouts = list(all_ranks(bridge, tensors, len(homes), stages=stages, **parallel).values())
    return (
        prepare_push(layouts, files, lambda declared: derive_weight_map(bridge, tensors, declared), homes),
        files,
    )


CASES = [
    # the last: how many shards lie partly in files of their own replica, and partly in others'
    ("tiny", {"tp": 2, "pp": 1}, (0, 1), 2),
    ("tiny", {"tp": 2, "pp": 2}, (0, 0, 1, 1), 2),
    ("tiny", {"tp": 2, "pp": 2}, (0, 1, 2, 1), 2),
    ("qwen2", {"tp": 4, "pp": 2}, (0, 0, 0, 0, 1, 1, 1, 1), 0),
    ("qwen2", {"tp": 4, "pp": 2}, (0, 1) * 4, 8),
    ("llama", {"tp": 2, "pp": 2}, (0, 1, 2, 3, 0, 1, 2, 3), 5),
]


@pytest.mark.parametrize(("family", "parallel", "homes", "divided"), CASES)
def test_what_ranks_write_and_what_they_stream_fill_every_owners_files_exactly_once(
    family: str, parallel: dict[str, int], homes: tuple[int, ...], divided: int
) -> None:
    prepared, files = prepared_for(bridge_of(family), homes, **parallel)
    spread = prepared.spread
    assert spread is not None
    random = np.random.default_rng(0)
    streams = {r: random.integers(0, 256, s.nbytes, np.uint8) for r, s in prepared.streams.items()}
    whole = {file.name: np.zeros(file.nbytes, np.uint8) for file in files.files}
    for rank, stream in streams.items():
        prepared.transfer.scatter(stream.data, 0, whole, str(rank))

    images = {
        replica: {name: np.zeros_like(whole[name]) for name in spread.files_of(replica)} for replica in set(homes)
    }
    counts = dict.fromkeys(whole, 0)
    found_divided = 0

    def count(replica: int, filled: Any) -> None:
        for name, nbytes in filled.items():
            if name in images[replica]:
                counts[name] += nbytes

    for rank, stream in streams.items():
        home, layout = homes[rank], prepared.streams[rank]
        parts = prepared.grantable[rank]
        plan = plan_to_proto(prepared.transfer, layout, str(rank), parts)
        assert set(plan.files) <= images[home].keys()
        memories = list(images[home].values())
        places = {name: (number, 0) for number, name in enumerate(images[home])}
        copies = placed_copies(plan, layout, places, [len(memory) for memory in memories])
        for placement, of_shard in zip(layout.placements, copies, strict=True):
            shard = stream[placement.offset : placement.offset + placement.nbytes]
            write_bytes(shard, of_shard, memories)
            found_divided += 0 < sum(copy.nbytes for copy in of_shard) < placement.nbytes
        for start, stop in parts:
            count(home, prepared.transfer.filled(start, stop, str(rank)))
        streamed = RangeSet((each.start, each.end) for each in plan.streamed)
        assert streamed.size + parts.size == layout.nbytes
        for start, stop in streamed:
            count(home, prepared.transfer.scatter(stream[start:stop].data, start, images[home], str(rank)))
        for replica, meant in spread.routes.get(rank, {}).items():
            if replica != home:
                for start, stop in meant:
                    assert streamed.covers(start, stop)
                    data = stream[start:stop].data
                    count(replica, prepared.transfer.scatter(data, start, images[replica], str(rank)))
    for image in images.values():
        for name, data in image.items():
            assert data.tobytes() == whole[name].tobytes(), name
    assert counts == prepared.fills
    assert found_divided == divided


def test_a_push_to_one_replica_is_granted_whole() -> None:
    prepared, _ = prepared_for(bridge_of("tiny"), (0, 0), tp=2, pp=1)
    assert prepared.spread is None
    for rank, stream in prepared.streams.items():
        assert list(prepared.grantable[rank]) == [(0, stream.nbytes)]
        assert not plan_to_proto(prepared.transfer, stream, str(rank), prepared.grantable[rank]).streamed


def test_owners_are_chosen_so_that_pipeline_stages_on_nodes_of_their_own_stream_little() -> None:
    """Each stage's files are filled by its own ranks: only a file in which two stages meet crosses."""
    prepared, _ = prepared_for(bridge_of("tiny"), (0, 0, 1, 1), tp=2, pp=2)
    assert prepared.spread is not None
    granted = sum(parts.size for parts in prepared.grantable.values())
    largest = max(prepared.fills.values())
    assert granted >= sum(stream.nbytes for stream in prepared.streams.values()) - 2 * largest


@pytest.mark.parametrize("ranges", [[], [(0, 10)], [(3, 5), (5, 9), (20, 21)]])
def test_gaps_are_what_a_set_does_not_hold(ranges: list[tuple[int, int]]) -> None:
    held = {position for start, end in ranges for position in range(start, end)}
    found = RangeSet(ranges)
    for start in range(0, 25, 3):
        for end in range(start, 25, 4):
            gaps = {position for a, b in found.gaps(start, end) for position in range(a, b)}
            assert gaps == set(range(start, end)) - held
