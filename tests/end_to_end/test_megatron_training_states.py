"""Does training of Megatron-core models go on from a training state: to the bit on as many ranks, with all of it at another parallelism?

Ranks train real models by Megatron's own optimizers and scheduler. They push in the middle of a run, which goes on: its later losses are the
independent answer to those of ranks that restore. What all ranks together have is compared with what Megatron itself would save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config
from tests.support.services import RunningService, running_service
from weighbridge import CheckpointManager, TrainerClient
from weighbridge_demo.megatron_cpu import Parallel, build_model

MODELS = [("llama", "bfloat16"), ("qwen2", "bfloat16"), ("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32")]
TIED = ("qwen2",)
BEFORE, AFTER = 3, 4


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for family, dtype in MODELS:
                described = tmp_path_factory.mktemp(family)
                tiny_config(family, tied=family in TIED).save_pretrained(described)
                trainer.register_model(f"tests/{family}-{dtype}", described, dtype=dtype)
        yield running


@dataclass(frozen=True)
class Case:
    """A model, its optimizer, and the job that pushes its state."""

    family: str
    parallel: Parallel
    distributed: bool
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Of the model in the service."""
        return f"tests/{self.family}-{self.dtype}"

    def loop(self, parallel: Parallel, *, seed: int) -> Loop:
        """One rank of a job of this parallelism."""
        config = tiny_config(self.family, tied=self.family in TIED)
        build = build_family_model if "moe" in self.family else build_model
        training = TrainingRank(
            config,
            parallel,
            distributed=self.distributed,
            dtype=getattr(torch, self.dtype),
            build=build,
            seed=seed,
        )
        return Loop(training)


class Loop:
    """One rank of a training loop that has all that a real one has: a scheduler, random numbers, arguments."""

    def __init__(self, training: TrainingRank) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.training = training
        self.scheduler = OptimizerParamScheduler(
            training.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=16, lr_decay_steps=80,
            lr_decay_style="cosine", start_wd=0.01, end_wd=0.1, wd_incr_steps=80, wd_incr_style="linear",
        )  # fmt: skip
        self.state: dict[str, Any] = {"scheduler": self.scheduler, "iteration": 0}
        self.random = torch.Generator().manual_seed(torch.distributed.get_rank())

    def step(self) -> float | None:
        """One step, on a batch that the iteration chooses."""
        loss = self.training.step(self.state["iteration"])
        self.scheduler.step(8)
        self.state["iteration"] += 1
        return loss

    def push(self, trainer: TrainerClient, name: str) -> int:
        """Push it, and wait until it is durable. The version's number."""
        rank_state = {"random": self.random.get_state()}
        handle = trainer.push(
            name, self.training.sharded_state_dict(), step=self.state["iteration"], optimizer=self.training.optimizer,
            state=self.state, rank_state=rank_state,
        )  # fmt: skip
        assert handle.training is not None
        handle.wait(timeout=120)
        return handle.training.wait(timeout=120).number

    def manager(self, trainer: TrainerClient, name: str, rank_state: dict[str, Any]) -> CheckpointManager:
        """What saves it while it goes on."""
        return CheckpointManager(
            trainer, name, self.training.model, self.training.optimizer, state=self.state, rank_state=rank_state,
            until="optimizer_step",
        )  # fmt: skip

    def restore(self, trainer: TrainerClient, name: str, **options: Any) -> None:
        """Restore it."""
        trainer.restore(
            name,
            self.training.sharded_state_dict(),
            optimizer=self.training.optimizer,
            state=self.state,
            **options,
        )


@dataclass(frozen=True)
class Seen:
    """What one rank saw.

    Attributes:
        number: of the version that it pushed.
        own: what Megatron would have saved then.
        losses: of the steps after that.
        drawn: random numbers drawn after that.
        rates: of learning, of each group, in the end.
    """

    number: int
    own: Any
    losses: list[float | None]
    drawn: Tensor
    rates: list[float]


def _after(loop: Loop, number: int, own: Any) -> Seen:
    losses = [loop.step() for _ in range(AFTER)]
    drawn = torch.rand(8, generator=loop.random)
    return Seen(number, own, losses, drawn, [group["lr"] for group in loop.training.optimizer.param_groups])


def _killed(rank: int, address: str, case: Case, folder: str) -> None:
    loop = case.loop(case.parallel, seed=0)
    with TrainerClient(address, run=folder) as trainer:
        for _ in range(BEFORE):
            loop.step()
        torch.rand(rank, generator=loop.random)
        own = loop.training.own_state()
        seen = _after(loop, loop.push(trainer, case.name), own)
        torch.save(seen, Path(folder, str(rank)))
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank: int, address: str, case: Case, number: int) -> Seen:
    del rank
    loop = case.loop(case.parallel, seed=1)
    kept: dict[str, Any] = {"random": None}
    with TrainerClient(address) as trainer:
        loop.restore(trainer, case.name, version=number, rank_state=kept)
    loop.random.set_state(kept["random"])
    return _after(loop, number, loop.training.own_state())


def _elsewhere(
    rank: int, address: str, case: Case, parallel: Parallel, number: int, run: str
) -> tuple[Any, int]:
    del rank
    loop = case.loop(parallel, seed=2)
    with TrainerClient(address, run=run) as trainer:
        loop.restore(trainer, case.name, version=number)
        return loop.training.own_state(), loop.push(trainer, case.name)


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (Case("llama", Parallel(tp=2, pp=2, dp=2), False), [Parallel(pp=2, dp=4), Parallel(tp=4)]),
        (Case("llama", Parallel(tp=2, dp=2), True), [Parallel(tp=4), Parallel(pp=2, dp=3)]),
        (Case("qwen2", Parallel(pp=2, dp=2), True), [Parallel(tp=2, pp=2), Parallel(dp=3)]),
        (Case("qwen3_moe", Parallel(dp=4, ep=2), False), [Parallel(dp=4, ep=4), Parallel(dp=2, ep=2)]),
        (
            Case("qwen3_moe", Parallel(dp=4, ep=2), True, "float32"),
            [Parallel(dp=4, ep=4), Parallel(dp=2)],
        ),
    ],
    ids=["dense", "dense, distributed", "tied over stages, distributed", "experts", "experts, distributed"],
)
def test_training_goes_on_after_all_ranks_were_killed(
    service: RunningService, tmp_path: Path, case: Case, others: list[Parallel]
) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(case.parallel, _killed, service.address, case, str(tmp_path), timeout=300)
    ranks = range(case.parallel.world_size)
    expected = [torch.load(tmp_path / str(rank), weights_only=False) for rank in ranks]
    number = expected[0].number
    assert any(loss is not None for loss in expected[-1].losses)

    again = run_ranks(case.parallel, _resumed, service.address, case, number, timeout=300)
    for found, before in zip(again, expected, strict=True):
        assert found.losses == before.losses
        assert found.rates == before.rates
        assert torch.equal(found.drawn, before.drawn)
    own = wholes(each.own for each in expected)
    _same(wholes(each.own for each in again), own)
    for turn, parallel in enumerate(others):
        run = f"{tmp_path.name}-{turn}"
        there = run_ranks(parallel, _elsewhere, service.address, case, parallel, number, run, timeout=300)
        _same(wholes(each for each, _ in there), own)
        number = there[0][1]


def _managed(rank: int, address: str, case: Case, folder: str) -> None:
    loop = case.loop(case.parallel, seed=0)
    own_state: dict[str, Any] = {}
    with TrainerClient(address, run=folder) as trainer:
        checkpoints = loop.manager(trainer, case.name, own_state)
        for step in range(BEFORE):
            loop.step()  # waits for what is left of the save before
            own_state["random"] = loop.random.get_state()
            own = loop.training.own_state()
            number = checkpoints.save(step).number
        seen = _after(loop, number, own)
        checkpoints.wait(timeout=120)
        torch.save(seen, Path(folder, str(rank)))
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def _managed_again(rank: int, address: str, case: Case, as_function: bool) -> Seen:
    del rank
    loop = case.loop(case.parallel, seed=1)
    kept: dict[str, Any] = {"random": None}
    with TrainerClient(address) as trainer:
        checkpoints = loop.manager(trainer, case.name, kept)
        if as_function:
            checkpoints = CheckpointManager(
                trainer, case.name, loop.training.sharded_state_dict, loop.training.optimizer, state=loop.state, rank_state=kept
            )  # fmt: skip
        version = checkpoints.restore()
    assert version is not None
    assert version.step == BEFORE - 1
    loop.random.set_state(kept["random"])
    return _after(loop, version.number, loop.training.own_state())


@pytest.mark.parametrize(
    "case",
    [Case("llama", Parallel(tp=2, dp=2), True), Case("qwen2", Parallel(pp=2), False)],
    ids=["distributed", "plain"],
)
def test_a_manager_saves_every_step_while_training_goes_on_and_brings_back_the_last(
    service: RunningService, tmp_path: Path, case: Case
) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(case.parallel, _managed, service.address, case, str(tmp_path), timeout=300)
    expected = [
        torch.load(tmp_path / str(rank), weights_only=False) for rank in range(case.parallel.world_size)
    ]
    for as_function in (False, True):
        again = run_ranks(case.parallel, _managed_again, service.address, case, as_function, timeout=300)
        for found, before in zip(again, expected, strict=True):
            assert (found.number, found.losses, found.rates) == (before.number, before.losses, before.rates)
            assert torch.equal(found.drawn, before.drawn)
        _same(wholes(each.own for each in again), wholes(each.own for each in expected))
