"""Do more ranks and watchers than the service has threads still get along?"""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.forked import ForkedPython
from tests.support.many_ranks import TENSOR
from tests.support.new_threads import NewThreads
from tests.support.raw_clients import tiny_config_json, tiny_shapes
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge.errors import ResourceExhausted
from weighbridge_service.api.grpc.server import CallLimits
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.model_tensors import ModelTensors

MODEL = "tests/many"
RANKS, WORKERS = 24, 6


@pytest.mark.parametrize("workers", [WORKERS])
def test_more_ranks_than_threads_can_push_one_version(tmp_path: Path, workers: int) -> None:
    model = tiny_model(tiny_config("llama", tied=False), seed=3)
    model.save_pretrained(tmp_path / "hf")
    state = model.state_dict()
    bridge = bridge_for((tmp_path / "hf" / "config.json").read_bytes())
    specs = list(ModelTensors(dtypes.parse("fp32")).specs(bridge).values())

    def rank_push(rank: int, address: str) -> int:
        mine: list[TensorSpec] = specs[rank::RANKS]
        layout = Layout.stream(mine, [Shard(s.name, Box.whole(s.shape)) for s in mine])
        shards = TensorSource(StagingPool(), layout, [state[spec.name] for spec in mine])
        with TrainerClient(address) as trainer:
            handle = trainer.push_shards(
                MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=1, rank=rank, world_size=RANKS
            )
            return handle.wait(timeout=60).number

    with running_service(tmp_path / "store", most_streams=workers) as running:
        TrainerClient(running.address).register_model(MODEL, tmp_path / "hf")
        with ThreadPoolExecutor(RANKS) as ranks:
            numbers = set(ranks.map(rank_push, range(RANKS), [running.address] * RANKS))
        assert len(numbers) == 1
        with EngineClient(running.address) as engine:
            for name, tensor in engine.pull(MODEL, numbers.pop()):
                assert torch.equal(tensor, state[name]), name


def test_the_watches_of_one_host_leave_some_to_others(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama", tied=False), seed=3)
    model.save_pretrained(tmp_path / "hf")
    with (
        running_service(tmp_path / "store", limits=CallLimits(watches=8)) as running,
        EngineClient(running.address, retry_seconds=1.0) as engine,
    ):
        TrainerClient(running.address).register_model(MODEL, tmp_path / "hf")
        refused, heard = threading.Semaphore(0), threading.Semaphore(0)

        def watch() -> None:
            try:
                for _ in engine.watch(MODEL, "live"):
                    heard.release()
                    return
            except ResourceExhausted:
                refused.release()

        watchers = [threading.Thread(target=watch) for _ in range(10)]
        for each in watchers:
            each.start()
        assert all(refused.acquire(timeout=60) for _ in range(4))
        TrainerClient(running.address).push_folder(MODEL, tmp_path / "hf").wait(timeout=60)
        assert all(heard.acquire(timeout=60) for _ in range(6))
        for each in watchers:
            each.join(60)
        assert not any(each.is_alive() for each in watchers)


def say(players: list[ForkedPython], line: str) -> None:
    for player in players:
        player.stdin.write(f"{line}\n")
        player.stdin.flush()


@pytest.mark.timeout(200)
def test_ranks_by_the_hundred_push_one_version_and_no_thread_is_held_for_each(tmp_path: Path) -> None:
    ranks, processes = rounds("RANKS"), 4
    config = {**json.loads(tiny_config_json()), "vocab_size": max(ranks, 128)}
    shapes = {**tiny_shapes(), TENSOR: (max(ranks, 128), 32)}
    model = "tests/hundreds"
    most = 0
    with (
        running_service(tmp_path / "store", most_streams=1024) as running,
        TrainerClient(running.address) as trainer,
    ):
        trainer.register_files(model, {"config.json": json.dumps(config).encode()})
        since = NewThreads()
        for step in range(2):  # at first all wait for each other, then none does
            bounds = [ranks * i // processes for i in range(processes + 1)]
            players = [
                ForkedPython(
                    "-m",
                    "tests.support.many_ranks",
                    running.address,
                    model,
                    *(str(n) for n in (ranks, first, last, step)),
                )
                for first, last in itertools.pairwise(bounds)
            ]
            say(players, json.dumps(shapes))
            assert [player.stdout.readline() for player in players] == ["there\n"] * processes
            started = time.monotonic()
            say(players, "go")
            while any(player.poll() is None for player in players):
                most = max(most, len(since.alive()))
                time.sleep(0.05)
            numbers = {player.communicate()[0].strip() for player in players}
            assert len(numbers) == 1
            version = trainer.wait_for(model, numbers.pop(), VersionState.DURABLE, timeout=60)
            assert (version.ranks, version.sealed_ranks) == (ranks, ranks)
            print(f"{ranks} ranks: {time.monotonic() - started:.1f} s, at most {most} threads")
        with EngineClient(running.address) as engine:
            for name, tensor in engine.pull(model, "live"):
                assert bool((tensor == 1.0).all()), name
    assert most < max(200, ranks // 2), "idle threads of a burst, and none for each rank"
