"""When something goes wrong for one rank of a real SGLang engine, or for all: does every parameter stay what it was?"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.sglang_engines import HAS_PLUGINS, Ranks, needs_sglang, ranks
from weighbridge import TrainerClient
from weighbridge.errors import WeighbridgeError

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL, WIDER, LARGE = "tests/experts", "tests/wider", "tests/large"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableService]:
    service = KillableService(tmp_path_factory.mktemp("store"), local_socket="auto")
    service.start()
    yield service
    service.kill()


@pytest.fixture(scope="module")
def folders(service: KillableService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Files of two versions of each model."""
    configs = {
        MODEL: tiny_config("qwen3_moe", tied=False),
        WIDER: tiny_config("qwen3_moe", tied=False, num_experts=16),
        LARGE: tiny_config("llama", tied=False, hidden_size=1024, vocab_size=65536),
    }
    found: dict[str, list[Path]] = {}
    with TrainerClient(service.address) as trainer:
        for name, config in configs.items():
            for seed in (1, 2):
                folder = tmp_path_factory.mktemp("model")
                tiny_model(config, seed).to(torch.bfloat16).save_pretrained(folder)
                if seed == 1:
                    trainer.register_model(name, folder)
                trainer.push_folder(name, folder, step=seed).wait(timeout=60)
                found.setdefault(name, []).append(folder)
    return found


@pytest.fixture(scope="module")
def engine(
    service: KillableService, folders: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with ranks(2, 1, tmp_path_factory.mktemp("ranks")) as started:
        started.tell("build", "whole", str(folders[MODEL][0]))
        if HAS_PLUGINS:
            started.tell("build", "engine", f"weighbridge://{service.address}/{MODEL}@1")
        else:
            started.tell("build", "engine", str(folders[MODEL][0]))
            started.tell("apply", "engine", order(service, MODEL, 1))
        yield started


@pytest.fixture(autouse=True)
def running(service: KillableService) -> None:
    service.kill()
    service.start()


def order(service: KillableService, model: str, version: int, **more: object) -> str:
    return json.dumps({"server": service.address, "model": model, "version": version, **more})


def check_untouched(engine: Ranks) -> None:
    assert all(not answer["names"] for answer in engine.tell("different", "whole", "engine"))
    assert [answer["served"] for answer in engine.tell("state", "engine")] == [f"{MODEL}@1"] * 2


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_versions_come_by_shared_memory_as_they_do_by_grpc(
    lane: str, engine: Ranks, service: KillableService, folders: dict[str, list[Path]]
) -> None:
    engine.tell("apply", "engine", order(service, MODEL, 2, lane=lane))
    engine.tell("build", "next", str(folders[MODEL][1]))
    assert all(not answer["names"] for answer in engine.tell("different", "next", "engine"))
    engine.tell("apply", "engine", order(service, MODEL, 1, lane=lane))
    engine.tell("forget", "next")
    check_untouched(engine)


def test_a_version_that_is_deleted_while_it_is_prepared_can_still_be_taken(
    engine: Ranks, service: KillableService, folders: dict[str, list[Path]], tmp_path: Path
) -> None:
    with TrainerClient(service.address) as trainer:
        retired = trainer.push_folder(MODEL, folders[MODEL][1], step=9).wait(timeout=60).number
        trainer.push_folder(MODEL, folders[MODEL][0], step=10).wait(timeout=60)
        engine.tell("prepare", "engine", order(service, MODEL, retired))
        trainer.delete_version(MODEL, retired)
        engine.tell("apply", "engine", order(service, MODEL, retired))
    engine.tell("build", "next", str(folders[MODEL][1]))
    assert all(not answer["names"] for answer in engine.tell("different", "next", "engine"))
    engine.tell("apply", "engine", order(service, MODEL, 1))
    engine.tell("forget", "next")
    check_untouched(engine)


def test_a_version_with_more_experts_is_refused(engine: Ranks, service: KillableService) -> None:
    for refusal in engine.refusals("apply", "engine", order(service, WIDER, 1)):
        assert "num_experts is 16, and 8 in the engine" in refusal
    check_untouched(engine)


def test_a_service_that_is_gone_is_waited_for_as_long_as_was_said_and_no_longer(
    engine: Ranks, service: KillableService
) -> None:
    service.kill()
    begin = time.monotonic()
    for refusal in engine.refusals("apply", "engine", order(service, MODEL, 2, retry_seconds=1)):
        assert "the engine keeps version 1" in refusal
    assert time.monotonic() - begin < 30
    check_untouched(engine)


def test_a_service_that_dies_while_the_bytes_come_leaves_every_parameter_as_it_was(
    engine: Ranks, service: KillableService, folders: dict[str, list[Path]]
) -> None:
    engine.tell("build", "large", str(folders[LARGE][0]))
    engine.tell("build", "large_whole", str(folders[LARGE][0]))
    wanted = order(service, LARGE, 2, retry_seconds=10)
    assert all(state["preparing"] for state in engine.tell("prepare", "large", wanted))
    service.kill()
    states = engine.tell("state", "large")
    while any(state["preparing"] for state in states):
        time.sleep(0.1)
        states = engine.tell("state", "large")
    assert any(state["error"] for state in states), "the service died too late to be noticed"
    engine.refusals("apply", "large", wanted)
    assert all(not answer["names"] for answer in engine.tell("different", "large", "large_whole"))

    service.start()
    engine.tell("apply", "large", order(service, LARGE, 2, retry_seconds=60))
    engine.tell("build", "large_whole", str(folders[LARGE][1]))
    assert all(not answer["names"] for answer in engine.tell("different", "large", "large_whole"))
    engine.tell("forget", "large", "large_whole")


def test_a_version_without_one_tensor_never_reaches_an_engine(
    engine: Ranks, service: KillableService, folders: dict[str, list[Path]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders[MODEL][1], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with TrainerClient(service.address) as trainer:
        with pytest.raises(WeighbridgeError, match="k_proj"):
            trainer.push_folder(MODEL, broken, step=3).wait(timeout=60)
        newest = trainer.version(MODEL, "latest").number
    engine.refusals("apply", "engine", order(service, MODEL, newest + 1, retry_seconds=1))
    check_untouched(engine)


def test_what_is_on_its_way_is_not_replaced_by_another_version(
    engine: Ranks, service: KillableService, folders: dict[str, list[Path]]
) -> None:
    engine.tell("build", "large", str(folders[LARGE][0]))
    engine.tell("prepare", "large", order(service, LARGE, 2))
    for refusal in engine.refusals("prepare", "large", order(service, LARGE, 1)):
        assert "version 2 is being prepared" in refusal
    engine.tell("apply", "large", order(service, LARGE, 2))
    assert [state["served"] for state in engine.tell("state", "large")] == [f"{LARGE}@2"] * 2
    engine.tell("forget", "large")
