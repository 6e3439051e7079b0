"""Training loops of Megatron ranks that are killed and go on from a training state, on CPU or on GPUs: what is compared
is the same.

Ranks train real models by Megatron's own optimizers and scheduler. They push in the middle of a run, which goes on: its
later losses are the independent answer to those of ranks that restore. What all ranks together have is compared with
what Megatron itself would save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import RankError
from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config
from weighbridge import CheckpointManager, TrainerClient
from weighbridge_demo.megatron_cpu import Parallel, build_model

TIED = ("qwen2",)
BEFORE, AFTER = 3, 4


@dataclass(frozen=True)
class Case:
    """A model, its optimizer, the job that pushes its state, and how weights travel."""

    family: str
    parallel: Parallel
    distributed: bool
    dtype: str = "bfloat16"
    lane: Literal["auto", "local", "grpc"] = "auto"

    @property
    def name(self) -> str:
        """Name of the model in the service."""
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
        self.random = torch.Generator("cpu").manual_seed(torch.distributed.get_rank())

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
        """Checkpoint manager that saves this loop while it trains."""
        return CheckpointManager(
            trainer, name, self.training.model, self.training.optimizer, state=self.state, rank_state=rank_state,
            until="optimizer_step",
        )  # fmt: skip

    def restore(self, trainer: TrainerClient, name: str, **options: Any) -> None:
        """Restore this loop."""
        trainer.restore(
            name,
            self.training.sharded_state_dict(),
            optimizer=self.training.optimizer,
            state=self.state,
            **options,
        )


@dataclass(frozen=True)
class Seen:
    """Results of one rank.

    Attributes:
        number: number of the version that it pushed.
        own: state that Megatron would have saved then.
        losses: losses of the steps after that.
        drawn: random numbers drawn after that.
        rates: learning rate of each group at the end.
    """

    number: int
    own: Any
    losses: list[float | None]
    drawn: Tensor
    rates: list[float]


def _after(loop: Loop, number: int, own: Any) -> Seen:
    losses = [loop.step() for _ in range(AFTER)]
    drawn = torch.rand(8, generator=loop.random, device="cpu")
    return Seen(number, own, losses, drawn, [group["lr"] for group in loop.training.optimizer.param_groups])


def _killed(rank: int, address: str, case: Case, folder: str) -> None:
    loop = case.loop(case.parallel, seed=0)
    with TrainerClient(address, run=folder, lane=case.lane) as trainer:
        for _ in range(BEFORE):
            loop.step()
        torch.rand(rank, generator=loop.random, device="cpu")
        own = loop.training.own_state()
        seen = _after(loop, loop.push(trainer, case.name), own)
        torch.save(seen, Path(folder, str(rank)))
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank: int, address: str, case: Case, number: int) -> Seen:
    del rank
    loop = case.loop(case.parallel, seed=1)
    kept: dict[str, Any] = {"random": None}
    with TrainerClient(address, lane=case.lane) as trainer:
        loop.restore(trainer, case.name, version=number, rank_state=kept)
    loop.random.set_state(kept["random"])
    return _after(loop, number, loop.training.own_state())


def _elsewhere(rank: int, address: str, case: Case, parallel: Parallel, number: int, run: str) -> tuple[Any, int]:
    del rank
    loop = case.loop(parallel, seed=2)
    with TrainerClient(address, run=run, lane=case.lane) as trainer:
        loop.restore(trainer, case.name, version=number)
        return loop.training.own_state(), loop.push(trainer, case.name)


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def _managed(rank: int, address: str, case: Case, folder: str) -> None:
    loop = case.loop(case.parallel, seed=0)
    own_state: dict[str, Any] = {}
    with TrainerClient(address, run=folder, lane=case.lane) as trainer:
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
    with TrainerClient(address, lane=case.lane) as trainer:
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


Launcher = Callable[..., list[Any]]
"""`tests.support.megatron_ranks.run_ranks`, or the same with ranks on GPUs."""


def register(trainer: TrainerClient, case: Case, folder: Path) -> None:
    """Register the model that a case trains."""
    tiny_config(case.family, tied=case.family in TIED).save_pretrained(folder)
    trainer.register_model(case.name, folder, dtype=case.dtype)


def check_that_it_goes_on_after_kills(
    run_ranks: Launcher, address: str, folder: Path, case: Case, others: Sequence[Parallel]
) -> None:
    """Push on all ranks, and kill them. As many new ranks go on bit for bit.

    Ranks of other parallelisms, one after the other, restore every tensor.
    """
    with pytest.raises(RankError):
        run_ranks(case.parallel, _killed, address, case, str(folder), timeout=300)
    expected = _seen(folder, case)
    assert any(loss is not None for loss in expected[-1].losses)

    number = expected[0].number
    again = run_ranks(case.parallel, _resumed, address, case, number, timeout=300)
    _same_run(again, expected)
    own = wholes(each.own for each in expected)
    for turn, parallel in enumerate(others):
        run = f"{folder.name}-{turn}"
        there = run_ranks(parallel, _elsewhere, address, case, parallel, number, run, timeout=300)
        _same(wholes(each for each, _ in there), own)
        number = there[0][1]


def check_that_a_manager_brings_back_the_last(run_ranks: Launcher, address: str, folder: Path, case: Case) -> None:
    """Save every step on all ranks while training goes on, and kill them.

    As many new ranks find the newest state, and go on bit for bit.
    """
    with pytest.raises(RankError):
        run_ranks(case.parallel, _managed, address, case, str(folder), timeout=300)
    expected = _seen(folder, case)
    for as_function in (False, True):
        again = run_ranks(case.parallel, _managed_again, address, case, as_function, timeout=300)
        assert [each.number for each in again] == [each.number for each in expected]
        _same_run(again, expected)


def _seen(folder: Path, case: Case) -> list[Seen]:
    """Results that the ranks wrote before they were killed."""
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(case.parallel.world_size)]


def _same_run(again: list[Seen], expected: list[Seen]) -> None:
    for found, before in zip(again, expected, strict=True):
        assert found.losses == before.losses
        assert found.rates == before.rates
        assert torch.equal(found.drawn, before.drawn)
    _same(wholes(each.own for each in again), wholes(each.own for each in expected))
