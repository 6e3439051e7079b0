"""Does NeMo-RL's own synchronizer bring the weights of its policy workers to its vLLM workers through the service, on
Ray?

Everything between the two is NeMo-RL's: worker groups, synchronizer, the mixins by which workers answer it, and vLLM's
loading. It is run where WEIGHBRIDGE_NEMO_RL names a checkout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from tests.support.jobs import Job, JobFailed
from tests.support.killable_service import KillableService
from tests.support.nemo_rl_jobs import needs_nemo_rl, nemo_rl_job
from tests.support.waiting import eventually
from tests.support.word_models import PROMPT, TOKENS, make_folder, said_by_transformers
from weighbridge import TrainerClient

pytestmark = [needs_nemo_rl, pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "tests/policy"
WORKERS = 2
BUCKET_RATIO = 0.001
"""2 MiB of the memory that devices are said to have."""
START_SECONDS = 900.0
"""Five processes import torch, Ray and vLLM."""


def of_the_page() -> dict[str, Any]:
    """The settings under ``policy.generation`` in the documentation page."""
    page = (Path(__file__).parents[2] / "docs" / "nemo-rl.md").read_text("utf-8")
    found = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    generation: dict[str, Any] = yaml.safe_load(found[1])["policy"]["generation"]
    return generation


class Place:
    """A service that can be killed, and a job of two policy workers and two rollouts beside it."""

    def __init__(self, service: KillableService, job: Job, model: PreTrainedModel, generation: dict[str, Any]) -> None:
        self.service = service
        self.job = job
        self.model = model
        self.generation = generation

    def scale(self, factor: float) -> None:
        """Multiply the weights of the policy workers, and the expected ones."""
        self.job.ask("of_policy", method="scale", factor=factor)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def sync(self) -> int:
        """A refit; the number of its version, to which each policy worker has pushed its share."""
        self.job.ask("sync")
        assert not self.job.ask("is_stale")
        pushed = self.job.ask("of_policy", method="pushed")
        (number,) = {number for number, _ in pushed}
        assert sum(nbytes for _, nbytes in pushed) == sum(tensor.nbytes for tensor in self.model.state_dict().values())
        return int(number)

    def check(self) -> None:
        """The rollouts hold the policy's weights to the bit, and answer as transformers does by them."""
        wanted = as_vllm_holds(self.model)
        for held in self.job.ask("of_rollouts", method="held"):
            assert held.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(torch.from_numpy(held[name]), tensor), name
        expected = said_by_transformers(self.model)
        for text, logprobs in self.job.ask("of_rollouts", method="goes_on", prompt=PROMPT, tokens=TOKENS):
            assert text.strip() == expected.text
            assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)

    def versions(self, **which: Any) -> list[Any]:
        """Those of the model, the newest first."""
        with TrainerClient(self.service.address) as client:
            return client.versions(MODEL, **which)


def as_vllm_holds(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A qwen3's tensors under the names of vLLM's parameters, which put some together."""
    state = model.state_dict()
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found = {}
    for name, tensor in state.items():
        whole = next((whole for whole, parts in fused.items() if name.split(".")[-2] in parts), None)
        if whole is None:
            found[name] = tensor
            continue
        stem = name.rsplit(".", 2)[0]
        found[f"{stem}.{whole}.weight"] = torch.cat([state[f"{stem}.{part}.weight"] for part in fused[whole]])
    return found


@pytest.fixture(scope="module")
def job_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """By the lines of the page."""
    folder = tmp_path_factory.mktemp("nemo_rl")
    model = make_folder(folder / "hf", 1, "qwen3")
    service = KillableService(folder / "store")
    generation = of_the_page()
    generation["refit_cfg"][generation["refit_transport"]] |= {
        "server": service.address,
        "model": MODEL,
        "hf_dir": str(folder / "hf"),
        "retry_seconds": 3.0,
        "timeout_seconds": 20.0,
        "update_weights_bucket_memory_ratio": BUCKET_RATIO,
    }
    service.start()
    try:
        with nemo_rl_job(folder) as job:
            job.begin("start", folder=str(folder / "hf"), generation=generation, workers=WORKERS)
            job.answer(START_SECONDS)
            yield Place(service, job, model, generation)
    finally:
        service.kill()


@pytest.fixture(scope="module", params=[False, True], ids=["kept", "released"])
def place(request: pytest.FixtureRequest, job_place: Place) -> Place:
    """With engines that are kept, or made known to each other before each refit."""
    generation = job_place.generation
    generation["refit_cfg"][generation["refit_transport"]]["release_after_refit"] = request.param
    job_place.job.ask("connect", generation=generation)
    return job_place


def test_each_refit_arrives_to_the_bit_and_is_answered_by(place: Place) -> None:
    numbers = []
    for factor in (1.0, -2.0, 0.5):
        place.scale(factor)
        numbers.append(place.sync())
        place.check()
    assert [version.number for version in place.versions()][: len(numbers)] == numbers[::-1]


def test_a_refit_that_fails_is_told_and_the_next_one_arrives(place: Place) -> None:
    place.sync()
    place.job.ask("of_policy", method="leave_out", name="model.norm.weight")
    place.scale(-1.0)
    with pytest.raises(JobFailed, match=r"model\.norm\.weight"):
        place.job.ask("sync")
    assert place.job.ask("is_stale")
    place.job.ask("of_policy", method="leave_out", name="")
    place.scale(-1.0)
    place.sync()
    place.check()


def test_a_service_that_is_killed_during_a_refit_is_told_of_and_serves_the_next_one(
    place: Place, tmp_path: Path
) -> None:
    before = place.sync()
    gate = tmp_path / "gate"
    place.job.ask("of_policy", method="hold", path=str(gate))
    place.scale(-1.0)
    place.job.begin("sync")
    eventually(lambda: place.versions(include_invisible=True)[0].number > before)
    place.service.kill()
    gate.touch()
    failed = place.job.outcome()
    assert isinstance(failed, JobFailed)
    assert place.service.address in str(failed)
    assert place.job.ask("is_stale")

    place.service.start()
    assert place.sync() > before
    place.check()
