"""Do ranks count elements that are not finite exactly as the service does, for every kind of push and lane?

NaN and infinities are at random places of shards, including padding. The service counts the received elements when it
verifies a version.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.sdk.clients.test_resume import CuttingProxy
from tests.support.raw_clients import rows_layout
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import PushReport, TrainerClient
from weighbridge._clients.calls import push_calls
from weighbridge._clients.push_handle import PushHandle
from weighbridge._core import striping
from weighbridge._core.layouts import Layout
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._memory import native_copies
from weighbridge.v1 import checkpoint_service_pb2 as pb

TOKENS = 131
"""Ranks pad them to a multiple of theirs."""
LANES = ["local", "grpc"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


def folder_of(path: Path, weights: Mapping[str, Tensor], config: Any) -> Path:
    path.mkdir()
    config.save_pretrained(path)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return path


def weights_of(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    state = tiny_model(config, seed=5).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def broken(tensor: Tensor, chance: random.Random, share: float = 0.01) -> Tensor:
    """The tensor with NaN and infinities in random places; sometimes none."""
    made = tensor.clone()
    flat = made.view(-1)
    for _ in range(int(len(flat) * share) if chance.random() < 0.7 else 0):
        flat[chance.randrange(len(flat))] = chance.choice([float("nan"), float("inf"), -float("inf")])
    return made


def nonfinite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.float())).sum())


def reports_of(handles: Sequence[PushHandle]) -> tuple[list[PushReport], int]:
    """The reports of all ranks, and the count of the service."""
    version = handles[0].wait(timeout=60)
    return [handle.report() for handle in handles], version.nonfinite_elements


def push_as_ranks(
    service: RunningService,
    model: str,
    lane: str,
    shards: Sequence[tuple[Layout, Sequence[Tensor]]],
    space: TensorSpace,
    step: int,
) -> tuple[list[PushReport], int]:
    with ExitStack() as stack:
        clients = [stack.enter_context(TrainerClient(service.address, lane=lane)) for _ in shards]

        def push(rank: int) -> PushHandle:
            layout, tensors = shards[rank]
            held = TensorSource(StagingPool(), layout, tensors)
            return clients[rank].push_shards(model, layout, space, held, step=step, rank=rank, world_size=len(shards))

        with ThreadPoolExecutor(len(shards)) as pool:
            return reports_of(list(pool.map(push, range(len(shards)))))


@pytest.fixture(params=["extension", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(native_copies, "_extension", lambda: None)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_megatron_ranks_count_what_they_push_without_padding(
    service: RunningService, tmp_path: Path, way: None, lane: str, family: str, tied: bool
) -> None:
    config = tiny_config(family, tied=tied, vocab_size=TOKENS, num_hidden_layers=2)
    folder = folder_of(tmp_path / "hf", weights_of(config, torch.float32), config)
    chance = random.Random(f"{lane}{family}")
    name = f"tests/megatron-{family}"
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, folder)
        layouts = [
            trainer.describe_shards(name, MegatronRank(tp=(tp, 4), pp=(pp, 2))) for pp in range(2) for tp in range(4)
        ]
    shards = []
    for layout in layouts:
        tensors = [torch.randn(p.shard.box.extent) for p in layout.placements]
        tensors = [broken(tensor, chance, 0.05) for tensor in tensors]
        for tensor, placement in zip(tensors, layout.placements, strict=True):
            if "word_embeddings" in placement.shard.tensor or "output_layer" in placement.shard.tensor:
                tensor[max(TOKENS - placement.shard.box.offset[0], 0) :] = float("nan")
        shards.append((layout, tensors))
    reports, found = push_as_ranks(service, name, lane, shards, TensorSpace.MEGATRON, step=chance.randrange(1 << 30))
    assert found > 0
    assert sum(report.nonfinite_elements for report in reports) == found
    for report in reports:
        assert {report.lane} == {lane}
        assert sum(count for _, count in report.nonfinite_tensors) == report.nonfinite_elements


def test_embeddings_that_a_checkpoint_has_twice_count_twice(service: RunningService, tmp_path: Path) -> None:
    """As the service finds them in the files."""
    config = tiny_config("deepseek_v3", tied=False, vocab_size=TOKENS, num_hidden_layers=2, num_nextn_predict_layers=1)
    with TrainerClient(service.address) as trainer:
        trainer.register_files("tests/mtp", {"config.json": config.to_json_string().encode()}, "bf16", ())
        layouts = [trainer.describe_shards("tests/mtp", MegatronRank(tp=(tp, 2), ep=(tp, 2))) for tp in range(2)]
    for step, lane in enumerate(LANES):
        shards = []
        for layout in layouts:
            dtypes = [layout.tensors[p.shard.tensor].dtype.torch for p in layout.placements]
            tensors = [torch.ones(p.shard.box.extent, dtype=d) for p, d in zip(layout.placements, dtypes, strict=True)]
            for tensor, placement in zip(tensors, layout.placements, strict=True):
                if "word_embeddings" in placement.shard.tensor:
                    tensor[:2, 0] = float("inf")
            shards.append((layout, tensors))
        reports, found = push_as_ranks(service, "tests/mtp", lane, shards, TensorSpace.MEGATRON, step)
        assert found == 2 * 2 * 2, "two rows of two ranks in two tensors"
        assert sum(report.nonfinite_elements for report in reports) == found


@pytest.mark.parametrize("lane", LANES)
def test_replicas_are_counted_by_the_rank_that_pushes_them(
    service: RunningService, tmp_path: Path, way: None, lane: str
) -> None:
    config = tiny_config("llama", tied=False, vocab_size=TOKENS, num_hidden_layers=1)
    weights = weights_of(config, torch.float32)
    with TrainerClient(service.address) as trainer:
        trainer.register_model("tests/replicas", folder_of(tmp_path / "hf", weights, config))
    chance = random.Random(lane)
    arrays = {name: broken(tensor, chance).numpy() for name, tensor in weights.items()}
    shards = []
    for rank in range(3):  # what three does not divide, all of them hold
        layout = rows_layout(arrays, rank, 3)
        boxes = [p.shard for p in layout.placements]
        tensors = [
            torch.from_numpy(
                arrays[s.tensor][tuple(slice(o, o + n) for o, n in zip(s.box.offset, s.box.extent, strict=True))].copy()
            )
            for s in boxes
        ]
        shards.append((layout, tensors))
    reports, found = push_as_ranks(
        service, "tests/replicas", lane, shards, TensorSpace.HUGGING_FACE, chance.randrange(1 << 30)
    )
    assert found == sum(int((~np.isfinite(array)).sum()) for array in arrays.values()) > 0
    assert sum(report.nonfinite_elements for report in reports) == found


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_state_dict_is_counted_as_it_arrives(
    service: RunningService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    way: None,
    lane: str,
    dtype: torch.dtype,
) -> None:
    """3.4e38 is a number in float32, and infinite in bfloat16."""
    config = tiny_config("llama", tied=False, vocab_size=TOKENS, num_hidden_layers=1)
    weights = weights_of(config, torch.float32)
    name = f"tests/state-{str(dtype).rpartition('.')[2]}"
    with TrainerClient(service.address, lane=lane) as trainer:
        registered = {key: tensor.to(dtype) for key, tensor in weights.items()}
        trainer.register_model(name, folder_of(tmp_path / "hf", registered, config))
        weights["model.norm.weight"][:3] = 3.4e38
        weights["lm_head.weight"] = weights["lm_head.weight"].t().contiguous().t()  # not in row-major order
        weights["lm_head.weight"][5, 7] = float("nan")
        expected = {key: nonfinite(tensor.to(dtype)) for key, tensor in weights.items()}
        with caplog.at_level(logging.WARNING, "weighbridge._clients.pushing"):
            reports, found = reports_of([trainer.push_state_dict(name, weights, step=hash(lane) % 1000)])
    [report] = reports
    assert found == report.nonfinite_elements == sum(expected.values()) == (1 if dtype == torch.float32 else 4)
    assert dict(report.nonfinite_tensors) == {key: count for key, count in expected.items() if count}
    by_rank = (record for record in caplog.records if record.name == "weighbridge._clients.pushing")
    [line] = [record.getMessage() for record in by_rank]
    assert "lm_head.weight (1)" in line
    assert f" {found} element{'s' if found > 1 else ''} that" in line


@pytest.mark.parametrize("lane", LANES)
def test_a_folder_is_counted(service: RunningService, tmp_path: Path, way: None, lane: str) -> None:
    config = tiny_config("llama", tied=False, vocab_size=TOKENS, num_hidden_layers=1)
    chance = random.Random(1)
    weights = {name: broken(tensor, chance) for name, tensor in weights_of(config, torch.bfloat16).items()}
    with TrainerClient(service.address, lane=lane) as trainer:
        handle = trainer.import_folder(f"tests/folder-{lane}", folder_of(tmp_path / "hf", weights, config))
        reports, found = reports_of([handle])
    assert found == reports[0].nonfinite_elements == sum(nonfinite(tensor) for tensor in weights.values()) > 0


@pytest.mark.parametrize("seed", range(2))
def test_what_is_sent_again_is_counted_once(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1 << 20)
    config = tiny_config("llama", tied=False, vocab_size=32_768, num_hidden_layers=1)
    chance = random.Random(seed)
    weights = {name: broken(tensor, chance) for name, tensor in weights_of(config, torch.float32).items()}
    weights["lm_head.weight"][0] = float("nan")
    proxy = CuttingProxy(service.grpc.port, cuts=4, between=(1 << 20, 6 << 20), seed=seed)
    with TrainerClient(proxy.address, lane="grpc", connections=2) as trainer:
        handle = trainer.import_folder(f"tests/cut-{seed}", folder_of(tmp_path / "hf", weights, config))
        reports, found = reports_of([handle])
    proxy.close()
    assert proxy.cuts >= 2
    assert found == reports[0].nonfinite_elements == sum(nonfinite(tensor) for tensor in weights.values()) > 0


def test_a_seal_says_the_count_and_none_is_not_zero() -> None:
    def asked(count: int | None) -> pb.SealRankRequest:
        header = pb.PushHeader(model="a/b", number=1)
        [request] = next(push_calls.seal(header, nonfinite_elements=count)).request
        return pb.SealRankRequest.FromString(request)

    assert asked(0).HasField("nonfinite_elements")
    assert asked(7).nonfinite_elements == 7
    assert not asked(None).HasField("nonfinite_elements")


class UncountedSource(TensorSource):
    """A source from before shards were counted: the writer reports no count."""

    def write(self, *arguments: Any) -> None:  # type: ignore[override]
        super().write(*arguments)


def test_a_source_that_does_not_count_is_pushed_and_says_no_number(service: RunningService, tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False, vocab_size=TOKENS, num_hidden_layers=1)
    weights = weights_of(config, torch.float32)
    layout = rows_layout({name: tensor.numpy() for name, tensor in weights.items()}, 0, 1)
    with TrainerClient(service.address, lane="local") as trainer:
        trainer.register_model("tests/uncounted", folder_of(tmp_path / "hf", weights, config))
        held = [weights[placement.shard.tensor] for placement in layout.placements]
        shards = UncountedSource(StagingPool(), layout, held)
        handle = trainer.push_shards(
            "tests/uncounted", layout, TensorSpace.HUGGING_FACE, shards, step=1, rank=0, world_size=1
        )
        assert handle.wait(timeout=60).nonfinite_elements == 0
        assert handle.report().nonfinite_elements is None
