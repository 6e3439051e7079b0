"""Do AReaL's trainer and two of its FSDP2 ranks update engines through the service, and does generation survive
failures?

The engines are HTTP servers that answer as SGLang's do, and load the weights that a request names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.areal_jobs import ArealJob, Engine, areal_engine, areal_job, needs_areal, write_tokenizer
from tests.support.jobs import JobFailed
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.waiting import eventually
from weighbridge import TrainerClient

pytestmark = [needs_areal, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tests/policy"


class Place:
    """A service, a job and two engines."""

    def __init__(
        self, service: KillableService, job: ArealJob, engines: list[Engine], weights: dict[str, torch.Tensor]
    ) -> None:
        self.service = service
        self.job = job
        self.engines = engines
        self._weights = weights
        self.factor = 1.0
        self.version = 0

    def scale(self, factor: float) -> None:
        self.factor *= factor
        assert self.job.ask("scale", factor=factor) == [None, None]

    def update(self) -> list[Any]:
        """An update of all ranks: the version of each, or what it raised."""
        for engine in self.engines:
            engine.asked.clear()
        self.version += 1
        return self.job.ask("update", version=self.version)

    def check_updated(self, outcome: list[Any]) -> None:
        """Check that the update succeeded, and that engines have the actors' weights to the bit."""
        first, second = outcome
        assert isinstance(first, int), first
        assert first == second
        for engine in self.engines:
            self.check_going_on(engine)
            assert engine.asked == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            assert engine.loaded.keys() == self._weights.keys()
            for name, tensor in self._weights.items():
                assert torch.equal(engine.loaded[name], tensor * self.factor), name
        with TrainerClient(self.service.address) as client:
            found = client.version(MODEL, first)
        assert (found.step, found.run) == (self.version, "experiment/trial")

    @staticmethod
    def check_going_on(engine: Engine) -> None:
        assert engine.generates
        assert not engine.loaded_while_generating


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("areal")
    config = tiny_config("qwen3", tied=False, torch_dtype="bfloat16")
    model = tiny_model(config, seed=5).bfloat16()
    model.save_pretrained(folder / "hf")
    write_tokenizer(folder / "hf")
    service = KillableService(folder / "store", receive_timeout=20.0)
    service.start()
    with contextlib.ExitStack() as stack:
        stack.callback(service.kill)
        engines = [stack.enter_context(areal_engine()) for _ in range(2)]
        with areal_job(folder, service.address, MODEL, engines) as job:
            bases = job.ask("start", folder=str(folder / "hf"), root=str(folder / "files"))
            assert bases == [["WeighbridgeFSDPActor", "UpdatesByWeighbridge", "FSDPPPOActor"]] * 2
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            yield Place(service, job, engines, weights)


def test_engines_have_the_actors_weights_after_each_update_and_each_byte_is_pushed_once(place: Place) -> None:
    for _ in range(3):
        place.scale(-2.0)
        place.check_updated(place.update())
        pushed = [each["stream_bytes"] for each in place.job.ask("pushed")]
        nbytes = sum(tensor.nbytes for tensor in place.engines[0].loaded.values())
        assert sum(pushed) == nbytes
        assert max(pushed) <= 0.6 * nbytes


def test_a_rank_that_cannot_push_fails_all_and_engines_are_not_touched(place: Place) -> None:
    assert place.job.ranks[1].ask("spoil", name="extra") is None
    failed = place.update()
    assert all(isinstance(each, JobFailed) and "extra" in str(each) for each in failed)
    assert [engine.asked for engine in place.engines] == [[], []]
    place.job.ranks[1].ask("mend", name="extra")
    place.scale(0.5)
    place.check_updated(place.update())


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
def test_generation_goes_on_if_an_engine_refuses_and_all_ranks_hear_of_it(place: Place, path: str) -> None:
    place.scale(-1.0)
    place.engines[1].refuses = {path}
    failed = place.update()
    assert all(isinstance(each, JobFailed) and "rollouts did not get" in str(each) for each in failed)
    assert [engine.asked[-1] for engine in place.engines] == ["/continue_generation"] * 2
    place.engines[1].refuses = set()
    if path == "/continue_generation":
        assert "generation is still paused" in str(failed[0])
    else:
        for engine in place.engines:
            place.check_going_on(engine)
    place.check_updated(place.update())


def test_a_service_that_is_killed_in_the_middle_of_an_update_is_told_of_and_the_next_update_works(
    place: Place, tmp_path: Path
) -> None:
    held = tmp_path / "go"
    place.job.ranks[1].ask("hold_pushes", path=str(held))
    for engine in place.engines:
        engine.asked.clear()
    place.version += 1
    place.job.begin("update", version=place.version)
    eventually(Path(f"{held}.waiting").exists)
    with TrainerClient(place.service.address) as client:
        # what rank 0 has not yet sealed it would push to the next service
        eventually(lambda: "rank 1 to push and seal" in client.versions(MODEL, include_invisible=True)[0].waits_for)
    place.service.kill()
    place.service.start()
    held.touch()
    failed = place.job.answers()
    assert all(isinstance(each, JobFailed) and "the weights were not pushed" in str(each) for each in failed)
    assert [engine.asked for engine in place.engines] == [[], []]

    place.scale(3.0)
    place.check_updated(place.update())
