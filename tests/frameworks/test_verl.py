"""Does verl 0.9 update its rollouts through the service, with its own actors, workers and manager on Ray, and by its
own comparison?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.jobs import Job, JobFailed
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.verl_jobs import needs_verl, verl_job
from tests.support.waiting import eventually
from weighbridge import TrainerClient

pytestmark = [needs_verl, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tests/policy"
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096}


def written(folder: Path, **fields: Any) -> PreTrainedModel:
    """A small model in bf16, saved with its weights."""
    config = tiny_config("llama", tied=False, **{**SIZES, "num_hidden_layers": 2, "head_dim": 32, **fields})
    model = tiny_model(config, seed=3).bfloat16()
    model.config.torch_dtype = "bfloat16"
    model.save_pretrained(folder)
    return model


def nbytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def said(address: str, folder: Path, **more: Any) -> dict[str, Any]:
    """``engine_kwargs.weighbridge``."""
    return {"server": address, "model": MODEL, "hf_dir": str(folder), "lane": "grpc", **more}


class Place:
    """A service, and a job of two actors and two rollouts beside it."""

    def __init__(self, service: RunningService, job: Job, model: PreTrainedModel) -> None:
        self.service = service
        self.job = job
        self.nbytes = nbytes(model)

    def factor(self) -> float:
        """By what the actors' weights have been multiplied."""
        return float(self.job.ask("factor"))

    def pushed_bytes(self) -> int:
        return int(self.service.service.intake.bytes_in)

    def pulled_bytes(self) -> int:
        return int(self.service.service.serving.bytes_out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return written(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("verl")
    model.save_pretrained(folder / "hf")
    with running_service(folder / "store") as service, verl_job(folder) as job:
        settings = said(service.address, folder / "hf")
        job.ask("start", folder=str(folder / "hf"), said=settings, actors=2, rollouts=2)
        yield Place(service, job, model)


@pytest.mark.parametrize("manager", ["verl", "weighbridge"])
def test_five_updates_pass_verls_own_comparison_and_move_each_byte_once(place: Place, manager: str) -> None:
    for step in range(1, 6):
        before = place.pushed_bytes()
        place.job.ask("scale", factor=-2.0)
        metrics = place.job.ask("update", step=step, manager=manager)
        place.job.ask("check")

        version = TrainerClient(place.service.address).version(MODEL, int(metrics["weighbridge/version"]))
        assert version.step == step
        pushed = place.job.ask("pushed")
        assert {each["number"] for each in pushed} == {version.number}
        assert sum(each["stream_bytes"] for each in pushed) == place.nbytes
        assert max(each["stream_bytes"] for each in pushed) <= 0.6 * place.nbytes
        assert place.pushed_bytes() - before <= 1.01 * place.nbytes


def test_replicas_that_come_later_take_the_newest_version_without_the_actors(place: Place) -> None:
    place.job.ask("scale", factor=0.5)
    number = int(place.job.ask("update", step=11)["weighbridge/version"])
    place.job.ask("check")
    pushed = place.pushed_bytes()

    place.job.ask("restart_rollouts")
    assert place.job.ask("catch_up") == number
    place.job.ask("check")
    assert place.pushed_bytes() == pushed

    place.job.ask("scale", factor=-1.0)
    assert place.job.ask("update", step=12)["weighbridge/version"] == number + 1
    place.job.ask("check")


@pytest.mark.parametrize("manager", ["verl", "weighbridge"])
def test_weights_that_contradict_the_model_are_refused_and_reach_no_rollout(place: Place, manager: str) -> None:
    before = place.pulled_bytes()
    place.job.ask("rename", name="model.norm.weight", to="model.nrom.weight")
    with pytest.raises(JobFailed, match=r"model\.nrom\.weight: the model has no such tensor"):
        place.job.ask("update", step=13, manager=manager)
    assert place.pulled_bytes() == before
    place.job.ask("rename", name="", to="")
    place.job.ask("update", step=14, manager=manager)
    place.job.ask("check")


def test_in_mode_slices_engines_pull_what_they_hold(place: Place, model: PreTrainedModel) -> None:
    place.job.ask("start_slices", size=2)
    with pytest.raises(JobFailed, match="checkpoint_manager_class"):
        place.job.ask("receive_in_mode_slices")
    for step in (21, 22):
        place.job.ask("scale", factor=-1.0)
        before = place.pulled_bytes()
        place.job.ask("update", step=step, manager="weighbridge")
        moved = place.pulled_bytes() - before
        engines = place.job.ask("slices")
        ranks = [rank for engine in engines for rank in engine]
        assert [len(engine) for engine in engines] == [2, 2]
        assert moved <= 1.01 * sum(rank["holds"] for rank in ranks)
        assert {rank["bytes"] for rank in ranks} == {rank["holds"] for rank in ranks}
        factor = place.factor()
        for engine in engines:
            assert_holds(engine, model, factor)
    heard = ["abort", "clear", "step 21", "resume", "abort", "clear", "step 22", "resume"]
    calls = ["start", "prepare", "apply", "finish"] * 2
    assert all(rank["heard"] == heard and rank["calls"] == calls for rank in ranks)


def assert_holds(engine: list[dict[str, Any]], model: PreTrainedModel, factor: float) -> None:
    """The ranks have the halves of the model that tensor parallelism gives them, times a factor."""
    state = {name: tensor.float() * factor for name, tensor in model.state_dict().items()}
    for rank, held in enumerate(engine):
        found = {name: torch.from_numpy(array) for name, array in held["parameters"].items()}
        for name, tensor in state.items():
            stem = name.removesuffix(".weight").replace(".", "_")
            if stem in found:
                axis = None if "norm" in stem else 1 if stem.endswith(("o_proj", "down_proj")) else 0
                wanted = tensor if axis is None else tensor.chunk(2, axis)[rank]
                assert torch.equal(found[stem], wanted), name
        for layer in range(model.config.num_hidden_layers):
            for fused, kinds in (
                ("self_attn_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("mlp_gate_up", ("mlp.gate_proj", "mlp.up_proj")),
            ):
                parts = [state[f"model.layers.{layer}.{kind}.weight"].chunk(2)[rank] for kind in kinds]
                assert torch.equal(found[f"model_layers_{layer}_{fused}"], torch.cat(parts)), (layer, fused)


def test_a_service_that_is_killed_during_an_update_is_told_of_and_serves_the_next_one(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    service = KillableService(tmp_path / "store")
    service.start()
    gate = tmp_path / "gate"
    with verl_job(tmp_path) as job:
        try:
            settings = said(service.address, folder, retry_seconds=3.0, timeout_seconds=60.0)
            job.ask("start", folder=str(folder), said=settings, actors=2, rollouts=2)
            job.ask("update", step=1)
            job.ask("check")

            job.ask("hold", path=str(gate))
            job.ask("begin_update", step=2)
            with TrainerClient(service.address) as client:
                eventually(lambda: client.versions(MODEL, include_invisible=True)[0].step == 2)
            service.kill()
            gate.touch()
            ended = job.ask("end_update")
            assert [len(side) for side in ended] == [2, 2]
            assert all(service.address in error for side in ended for error in side), ended

            service.start()
            job.ask("scale", factor=-2.0)
            metrics = job.ask("update", step=3)
            job.ask("check")
            with TrainerClient(service.address) as client:
                assert client.version(MODEL, int(metrics["weighbridge/version"])).step == 3
        finally:
            service.kill()


def test_megatron_ranks_are_actors_as_well(tmp_path: Path, model: PreTrainedModel) -> None:
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    with running_service(tmp_path / "store") as service, verl_job(tmp_path) as job:
        settings = said(service.address, folder)
        job.ask("start", folder=str(folder), said=settings, actors=4, rollouts=1, trainer="megatron")
        for step, manager in enumerate(["verl", "weighbridge", "verl", "weighbridge", "verl"], 1):
            before = service.service.intake.bytes_in
            job.ask("scale", factor=-2.0)
            job.ask("update", step=step, manager=manager)
            job.ask("check")
            assert service.service.intake.bytes_in - before <= 1.01 * nbytes(model)
            assert sum(each["stream_bytes"] for each in job.ask("pushed")) == nbytes(model)


def test_an_actor_needs_no_more_than_a_bucket_beside_what_verl_gathers(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    model = written(folder, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=16384)
    bucket = 32 << 20
    with running_service(tmp_path / "store") as service, verl_job(tmp_path) as job:
        settings = said(service.address, folder)
        job.ask("start", folder=str(folder), said=settings, actors=2, rollouts=0, bucket_mb=bucket >> 20)
        job.ask("peaks", how="send")  # what is imported and opened once
        gathered = job.ask("peaks", how="gather")
        sent = job.ask("peaks", how="send")
    assert nbytes(model) > 5 * bucket
    assert max(s - g for s, g in zip(sent, gathered, strict=True)) <= bucket


def test_the_lines_of_the_page_are_understood_by_verl(place: Place) -> None:
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text("utf-8")
    lines = re.findall(r"^ +(\+?actor_rollout_ref\.\S+)", page.partition("## ")[0], re.MULTILINE)
    assert len(lines) == 5
    found = place.job.ask("compose", lines=lines)
    assert found == {
        "backend": "weighbridge",
        "custom_backend_module": "weighbridge.integrations.verl",
        "engine_kwargs": {
            "weighbridge": {"server": "10.0.0.1:50051", "model": "acme/policy", "hf_dir": "/models/Qwen3-8B"}
        },
    }
