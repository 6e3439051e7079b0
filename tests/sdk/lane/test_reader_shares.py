"""Does a reader that keeps all that it has pulled stop itself, and not the trainers?"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.lane_client import connected
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import ResourceExhausted
from weighbridge.v1 import local_lane_pb2 as pb
from weighbridge_storage.memory.images import place_files

MODEL, OTHER = "acme/read", "acme/other"
NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture
def service(source: TinyModel, tmp_path: Path) -> Iterator[RunningService]:
    """With memory for eight images, and nothing else."""
    weights = source.folder / "model.safetensors"
    image = place_files({weights.name: weights.stat().st_size})[1]
    with running_service(
        tmp_path / "store", {MODEL: source.files, OTHER: source.files},
        local_socket=str(tmp_path / "lane.sock"), memory_budget=8 * image, spill_budget=0,
    ) as running:  # fmt: skip
        yield running


def push(trainer: TrainerClient, source: TinyModel, steps: range) -> None:
    """A version of each model, made durable, for each step."""
    for step in steps:
        for model in (MODEL, OTHER):
            trainer.push_folder(model, source.folder, step=step).wait(timeout=20)


def test_a_reader_that_keeps_each_version_is_refused_by_name_and_pushes_go_on(
    service: RunningService, source: TinyModel
) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    refused = ""
    with (
        TrainerClient(service.address, lane="local") as trainer,
        EngineClient(service.address, lane="local") as greedy,
        EngineClient(service.address) as any_lane,
    ):
        for step in range(1, 13):
            push(trainer, source, range(step, step + 1))
            try:
                kept.append(dict(greedy.pull(MODEL, "live")))
            except ResourceExhausted as error:
                refused = error.message
        assert 2 <= len(kept) <= 4
        assert refused.startswith("anonymous (uid ")
        assert f"keeps {len(kept)} images of" in refused
        # over gRPC it is served as before
        pull = any_lane.pull(MODEL, "live")
        assert dict(pull)[NAME].numpy().tobytes() == source.arrays[NAME].tobytes()
        assert pull.lane == "grpc"
        assert "no version needs any more" in pull.lane_reason
        kept.clear()
        gc.collect()
        eventually(lambda: not service.service.reader_shares.kept())
        assert len(list(greedy.pull(MODEL, "live"))) == len(source.arrays)


def test_what_a_reader_has_mapped_that_is_gone_without_a_word_counts_until_it_is_closed(
    service: RunningService, source: TinyModel
) -> None:
    kept = []
    shares = service.service.reader_shares
    with TrainerClient(service.address, lane="local") as trainer:
        for step in range(1, 4):
            push(trainer, source, range(step, step + 1))
            connection = connected(service.address)
            begin = pb.BeginRead(model=MODEL, version="live")
            answer, [descriptor] = connection.ask(pb.LaneRequest(begin_read=begin))
            kept.append(mmap.mmap(descriptor, answer.read.memories[0].bytes, prot=mmap.PROT_READ))
            os.close(descriptor)
            connection.close()  # the process stays, and so does its mapping
        push(trainer, source, range(4, 6))
        eventually(lambda: len(kept) * len(kept[0]) == sum(shares.kept().values()))
        with EngineClient(service.address, lane="local") as engine:
            with pytest.raises(ResourceExhausted, match="keeps 3 images"):
                list(engine.pull(MODEL, "live"))
            for mapping in kept:
                mapping.close()
            push(trainer, source, range(6, 8))  # which looks who has what open
            assert len(list(engine.pull(MODEL, "live"))) == len(source.arrays)
        eventually(lambda: not shares.kept())
