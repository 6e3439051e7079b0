"""Do ranks that hold different bytes under one box learn of it before the version is visible?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, LayoutError, TrainerClient, Version, WeighbridgeError

MODEL, WORLD = "tests/replicas", 3


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            config = tiny_config("llama", tied=False, num_hidden_layers=2)
            config.save_pretrained(tmp_path / "hf")
            trainer.register_model(MODEL, tmp_path / "hf", dtype="fp32")
        yield running


def weights(seed: int) -> dict[str, Tensor]:
    state = tiny_model(tiny_config("llama", tied=False, num_hidden_layers=2), seed=seed).state_dict()
    return {name: tensor.float() for name, tensor in state.items()}


@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_ranks_with_different_bytes_are_refused_by_name_and_later_pushes_go_on(
    service: RunningService, lane: str
) -> None:
    good = weights(1)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad["model.layers.1.mlp.up_proj.weight"][3, 5] += 1
    trainers = [TrainerClient(service.address, lane=lane) for _ in range(WORLD)]

    def push(rank: int, state: dict[str, Tensor], step: int) -> Version | WeighbridgeError:
        try:
            return trainers[rank].push_state_dict(MODEL, state, step=step, rank=rank, world_size=WORLD).wait(timeout=60)
        except WeighbridgeError as error:
            return error

    def all_push(states: list[dict[str, Tensor]], step: int) -> list[Version | WeighbridgeError]:
        with ThreadPoolExecutor(WORLD) as threads:
            return list(threads.map(push, range(WORLD), states, [step] * WORLD))

    errors: list[Version | WeighbridgeError] = []
    for step in (1, 2, 3):  # who pushes the same again is refused again
        errors += all_push([good, bad, good], step)
    assert all(isinstance(error, WeighbridgeError) for error in errors)
    told = [error for error in errors if isinstance(error, LayoutError)]
    assert told
    for error in told:
        [problem] = error.details
        assert "model.layers.1.mlp.up_proj.weight" in problem
        assert "rank 1" in problem
        assert len(set(re.findall(r"rank \d", problem))) == 2
    with EngineClient(service.address) as engine:
        assert engine.versions(MODEL) == []

        for step in (4, 5):  # the second one is sampled
            version = all_push([good, good, good], step)[0]
            assert isinstance(version, Version)
            pulled = dict(engine.pull(MODEL, version.number))
            assert all(torch.equal(tensor, good[name]) for name, tensor in pulled.items())
    for trainer in trainers:
        trainer.close()


def test_samples_of_later_pushes_find_a_rank_that_has_gone_its_own_way(service: RunningService) -> None:
    good, astray = weights(1), weights(2)
    trainers = [TrainerClient(service.address) for _ in range(2)]

    def push(rank: int, state: dict[str, Tensor], step: int) -> str:
        try:
            trainers[rank].push_state_dict(MODEL, state, step=step, rank=rank, world_size=2).wait(timeout=60)
        except WeighbridgeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(push, range(2), [good, good], [1, 1])) == ["", ""]
        found = [list(threads.map(push, range(2), [good, astray], [step] * 2)) for step in range(2, 12)]
    assert any(all(said) for said in found)  # one of some twenty shards in each push
    for trainer in trainers:
        trainer.close()
