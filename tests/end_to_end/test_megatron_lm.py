"""Does Megatron-LM's own ``--load`` take what is exported, and is what it saves itself imported? Skipped without a
checkout of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_lm import MegatronLM, needs_megatron_lm
from tests.support.megatron_ranks import run_ranks
from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel

pytestmark = needs_megatron_lm
MODEL = "tests/llama"
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model and its optimizer in the job that saves, and in the one that loads."""

    here: Parallel
    there: Parallel
    distributed: bool

    def rank(self, parallel: Parallel, seed: int) -> TrainingRank:
        return TrainingRank(
            tiny_config("llama", tied=False),
            parallel,
            distributed=self.distributed,
            dtype=torch.bfloat16,
            seed=seed,
        )


def _train(rank: int, case: Case, address: str, folder: str) -> tuple[int, Any]:
    """Train, push, and save by Megatron-LM. The number of the training state, and what Megatron gathers of the rank."""
    training = case.rank(case.here, 0)
    theirs = MegatronLM(training, save=folder, consumed_train_samples=24)
    for number in range(STEPS):
        training.step(number)
        theirs.scheduler.step(8)
    with TrainerClient(address) as trainer:
        handle = trainer.push(
            MODEL, training.sharded_state_dict(), step=STEPS, optimizer=training.optimizer,
            state={"opt_param_scheduler": theirs.scheduler, "args": theirs.plain_args()},
        )  # fmt: skip
        assert handle.training is not None
        number = handle.training.wait(timeout=120).number
    theirs.save(STEPS)
    return number, training.own_state()


def _load(rank: int, case: Case, folder: str, options: dict[str, Any]) -> tuple[Any, int, Any, int]:
    training = case.rank(case.there, 1)
    theirs = MegatronLM(training, load=folder, exit_on_missing_checkpoint=True, **options)
    iteration = theirs.load()
    return training.own_state(), iteration, theirs.scheduler.state_dict(), theirs.args.consumed_train_samples


def _restore(rank: int, case: Case, address: str, number: int) -> tuple[Any, Any]:
    training = case.rank(case.there, 1)
    theirs = MegatronLM(training)
    state: dict[str, Any] = {"opt_param_scheduler": theirs.scheduler, "iteration": 0, "args": None}
    with TrainerClient(address) as trainer:
        trainer.restore(MODEL, training.sharded_state_dict(), version=number, optimizer=training.optimizer, state=state)
    samples = state["args"]["consumed_train_samples"]
    return training.own_state(), (state["iteration"], theirs.scheduler.num_steps, samples)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(Parallel(tp=2), Parallel(pp=2), distributed=False), id="plain"),
        pytest.param(Case(Parallel(tp=2, dp=2), Parallel(dp=2), distributed=True), id="distributed"),
        pytest.param(Case(Parallel(dp=2), Parallel(dp=2), distributed=True), id="distributed, the same ranks"),
    ],
)
def test_megatron_lm_loads_what_is_exported_and_what_it_saved_is_imported(case: Case, tmp_path: Path) -> None:
    tiny_config("llama", tied=False).save_pretrained(tmp_path / "config")
    saved = tmp_path / "saved"
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_model(MODEL, tmp_path / "config", dtype="bfloat16")
        trained = run_ranks(case.here, _train, case, service.address, str(saved))
        number = trained[0][0]
        expected = wholes(own for _, own in trained)
        trainer.export_training(MODEL, number, tmp_path / "load")
        imported = trainer.import_training(MODEL, saved / f"iter_{STEPS:07d}").wait(timeout=120)
        assert imported.step == STEPS
        restored = run_ranks(case.there, _restore, case, service.address, imported.number)
        trainer.export_training(MODEL, imported.number, tmp_path / "again")

    found = wholes(own for own, _ in restored)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {values for _, values in restored} == {(STEPS, 8 * STEPS, 24)}
    # of ours it takes random numbers only where they were pushed
    for folder, options in (("load", {"no_load_rng": True}), ("again", {}), ("saved", {})):
        loaded = run_ranks(case.there, _load, case, str(tmp_path / folder), options)
        found = wholes(own for own, *_ in loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), folder
        for _, iteration, scheduler, samples in loaded:
            assert (iteration, scheduler["num_steps"], samples) == (STEPS, 8 * STEPS, 24)
