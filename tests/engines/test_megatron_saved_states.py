"""Does one line in a Megatron trainer save everything that resuming needs, and does training resume from it in both
ways?

The ranks save as Megatron-LM's ``save_checkpoint`` does: a state dict with arguments, iteration, model, optimizer,
scheduler and random states. They are killed, their folders are lost, and new ranks resume: by `TrainerClient.restore`,
and by loading the output of `TrainerClient.export_training` as ``--load`` does. The killed run had continued for a few
steps after the save: its losses are the independent reference.
"""

from __future__ import annotations

import argparse
import enum
import io
import logging
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config
from tests.support.services import RunningService, running_service
from weighbridge import FailedPrecondition, InvalidArgument, TrainerClient
from weighbridge.integrations.megatron_saved_state import SavedState
from weighbridge.integrations.megatron_saving import push_on_save
from weighbridge_demo.megatron_cpu import Parallel

MODEL = "tests/saved"
CONFIG = tiny_config("llama", tied=False, torch_dtype="bfloat16")
BEFORE, AFTER = 3, 3


class Backend(enum.Enum):
    """A value as Megatron-LM has it among its arguments, which no loader asks for."""

    AUTO = 5


class Loop:
    """One rank of a training loop that draws random numbers of each kind, and saves and loads as Megatron-LM does."""

    def __init__(self, parallel: Parallel, *, distributed: bool, seed: int) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.training = TrainingRank(CONFIG, parallel, distributed=distributed, dtype=torch.bfloat16, seed=seed)
        self.scheduler = OptimizerParamScheduler(
            self.training.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=16, lr_decay_steps=80,
            lr_decay_style="cosine", start_wd=0.01, end_wd=0.1, wd_incr_steps=80, wd_incr_style="linear",
        )  # fmt: skip
        self.args = argparse.Namespace(tensor_model_parallel_size=parallel.tp, attention_backend=Backend.AUTO)
        self.iteration = 0
        own = 100 * seed + torch.distributed.get_rank()
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)

    def step(self) -> float | None:
        loss = self.training.step(self.iteration)
        self.scheduler.step(8)
        self.iteration += 1
        return loss

    def random_states(self) -> Any:
        """As Megatron-LM's ``get_rng_state``, of a job without pipeline parallelism whose ranks all have theirs."""
        from megatron.core.dist_checkpointing import ShardedObject

        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
        return ShardedObject("rng_state", [found], (ranks,), (rank,))

    def go_on_at_random(self, states: Any) -> None:
        """As Megatron-LM's ``load_checkpoint``."""
        (found,) = states
        random.setstate(found["random_rng_state"])
        np.random.set_state(found["np_rng_state"])
        torch.set_rng_state(found["torch_rng_state"])

    def save(self, folder: Path, *, behind: bool = False, **others: Any) -> None:
        """As Megatron-LM's ``save_checkpoint``, with ``--async-save`` or without."""
        there = folder / f"iter_{self.iteration:07d}"
        there.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        common = {
            "args": self.args,
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "opt_param_scheduler": self.scheduler.state_dict(),
            "rng_state": self.random_states(),
            "num_floating_point_operations_so_far": 7e9,
        }
        request = self.training.save(there, {**common, **others}, async_sharded_save=behind)
        if behind:
            request.add_finalize_fn(partial(self._track, folder))
            request.execute_sync()
        else:
            self._track(folder)

    def _track(self, folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))

    def after(self) -> After:
        losses = [self.step() for _ in range(AFTER)]
        drawn = (random.random(), float(np.random.rand()), torch.rand(3))
        return After(losses, drawn, [group["lr"] for group in self.training.optimizer.param_groups])


@dataclass(frozen=True)
class After:
    """The observations of one rank after it saved or resumed."""

    losses: list[float | None]
    drawn: tuple[float, float, Tensor]
    rates: list[float]


@dataclass(frozen=True)
class Saved:
    """The contents of the rank's own checkpoint, and its observations afterwards."""

    own: Any
    after: After


def _killed(rank: int, address: str, hf_dir: str, folder: Path, parallel: Parallel, distributed: bool) -> None:
    loop = Loop(parallel, distributed=distributed, seed=0)
    options: dict[str, Any] = {"strict": True, "megatron_saves": distributed}
    with push_on_save(MODEL, address, hf_dir=hf_dir, run=str(folder), **options) as hook:
        for _ in range(BEFORE):
            loop.step()
        random.random()
        own = loop.training.own_state()
        loop.save(folder / "lost")
        saved = Saved(own, loop.after())  # the pushed tensors have been copied by now
        hook.wait(timeout=120)
        torch.save(saved, folder / f"saved-{rank}")
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def _restored(rank: int, address: str, parallel: Parallel, distributed: bool) -> Saved:
    del rank
    loop = Loop(parallel, distributed=distributed, seed=1)
    states = loop.random_states()
    state: dict[str, Any] = {"opt_param_scheduler": loop.scheduler, "iteration": 0, "args": None}
    with TrainerClient(address) as trainer:
        trainer.restore(
            MODEL,
            {"model": loop.training.sharded_state_dict(), "rng_state": states},
            optimizer=loop.training.optimizer,
            state=state,
        )
    loop.iteration = state["iteration"]
    loop.go_on_at_random(states.data)
    assert state["args"] == {"tensor_model_parallel_size": parallel.tp}
    return Saved(loop.training.own_state(), loop.after())


def _loaded(rank: int, folder: Path, parallel: Parallel, distributed: bool) -> Saved:
    del rank
    from megatron.core import dist_checkpointing

    loop = Loop(parallel, distributed=distributed, seed=2)
    number = int((folder / "latest_checkpointed_iteration.txt").read_text())
    there = folder / f"iter_{number:07d}"
    common = loop.training.load(there)
    loop.iteration = common["iteration"]
    loop.scheduler.load_state_dict(common["opt_param_scheduler"])
    assert common["args"] == argparse.Namespace(tensor_model_parallel_size=parallel.tp)
    assert common["num_floating_point_operations_so_far"] == 7e9
    loaded = dist_checkpointing.load({"rng_state": loop.random_states()}, str(there))
    loop.go_on_at_random(loaded["rng_state"])
    return Saved(loop.training.own_state(), loop.after())


def _elsewhere(rank: int, address: str, parallel: Parallel, distributed: bool) -> Any:
    del rank
    loop = Loop(parallel, distributed=distributed, seed=3)
    with TrainerClient(address) as trainer:
        trainer.restore(MODEL, {"model": loop.training.sharded_state_dict()}, optimizer=loop.training.optimizer)
    return loop.training.own_state()


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", drain_seconds=0.5) as running:
        yield running


def _same(found: Saved, expected: Saved) -> None:
    assert found.after.losses == expected.after.losses
    assert found.after.rates == expected.after.rates
    assert found.after.drawn[:2] == expected.after.drawn[:2]
    assert torch.equal(found.after.drawn[2], expected.after.drawn[2])


@pytest.mark.parametrize(
    ("parallel", "distributed", "other"),
    [(Parallel(tp=2, dp=2), True, Parallel(pp=2)), (Parallel(pp=2), False, Parallel(tp=2))],
    ids=["distributed", "plain"],
)
def test_a_loop_that_saves_as_megatron_lm_does_goes_on_to_the_bit_from_what_one_line_has_pushed(
    service: RunningService,
    tmp_path: Path,
    hf_dir: Path,
    parallel: Parallel,
    distributed: bool,
    other: Parallel,
) -> None:
    how = (parallel, distributed)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(parallel, _killed, service.address, str(hf_dir), tmp_path, *how, timeout=300)
    lost = tmp_path / "lost"
    assert any((lost / f"iter_{BEFORE:07d}").iterdir()) == distributed
    if distributed:
        shutil.rmtree(lost)
    ranks = range(parallel.world_size)
    saved = [torch.load(tmp_path / f"saved-{rank}", weights_only=False) for rank in ranks]
    own = wholes(each.own for each in saved)
    with TrainerClient(service.address) as trainer:
        weights, training = trainer.version(MODEL), trainer.version(f"{MODEL}:training")
        trainer.export_training(MODEL, None, lost, replace=True)
    assert (weights.step, weights.number) == (training.step, training.number) == (BEFORE, training.number)

    restored = run_ranks(parallel, _restored, service.address, *how, timeout=300)
    loaded = run_ranks(parallel, _loaded, lost, *how, timeout=300)
    for each, again, expected in zip(restored, loaded, saved, strict=True):
        _same(each, expected)
        _same(again, expected)
    there = wholes(run_ranks(other, _elsewhere, service.address, other, distributed, timeout=300))
    assert there.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(there[name], tensor), name


def test_all_that_is_saved_beside_the_model_is_kept_whatever_it_is() -> None:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    def weights() -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}

    first, second = weights(), weights()
    seen, none, nothing = torch.arange(4), torch.empty(0), torch.zeros(1)
    random_states = ShardedObject("rng", [1], (1,), (0,))
    others = {"seen": seen, "none": none, "nothing": nothing, "iteration": 0, "empty": {}}
    saved = {"model": first, "ema": second, "rng": random_states, **others}
    for taken in ([first, second], (first, second), {"model": first, "ema": second}):
        found = SavedState.of(saved, taken, (None, None))
        assert found.state.keys() == others.keys()
        assert all(torch.equal(found.state[name], others[name]) for name in ("seen", "none", "nothing"))
        assert found.sharded["model"] is taken
        assert [each.key for each in found.sharded["objects"]] == ["rng"]


def _nested(rank: int, address: str, hf_dir: str, folder: Path) -> str:
    from megatron.core import dist_checkpointing

    del rank
    heard = io.StringIO()
    logging.getLogger("weighbridge").addHandler(logging.StreamHandler(heard))
    loop = Loop(Parallel(), distributed=False, seed=0)
    loop.step()
    loop.save(folder)
    weights = loop.training.sharded_state_dict()
    optimizers = {"first": loop.training.optimizer.sharded_state_dict(weights)}
    with push_on_save(MODEL, address, hf_dir=hf_dir) as hook:
        folder = folder / "iter_0000002"
        folder.mkdir()
        dist_checkpointing.save({"model": weights, "optimizers": optimizers}, str(folder))
        hook.wait(timeout=60)
    return heard.getvalue()


def test_it_is_said_that_an_optimizer_is_not_pushed_which_lies_where_none_is_looked_for(
    service: RunningService, tmp_path: Path, hf_dir: Path
) -> None:
    (log,) = run_ranks(Parallel(), _nested, service.address, str(hf_dir), tmp_path / "run", timeout=240)
    assert f"{MODEL}: only the weights are pushed, because the saved state dict has no optimizer's" in log
    assert "optimizers has shards of" in log


def _odd(rank: int, address: str, hf_dir: str, folder: Path) -> tuple[str, bool]:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    before = ChainedOptimizer.sharded_state_dict
    heard = io.StringIO()
    logging.getLogger("weighbridge").addHandler(logging.StreamHandler(heard))
    loop = Loop(Parallel(tp=2), distributed=False, seed=0)
    odd = {"odd": Backend.AUTO} if rank == 1 else {}
    with push_on_save(MODEL, address, hf_dir=hf_dir, megatron_saves=False) as hook:
        loop.save(folder)  # before the optimizer's first step there is no state
        loop.step()
        loop.save(folder, **odd)
        hook.wait(timeout=60)
    with push_on_save(MODEL, address, run="behind", megatron_saves=False) as hook:
        loop.save(folder / "behind", behind=True)
        hook.wait(timeout=60)
    with (
        push_on_save(MODEL, address, run="strict", strict=True),
        pytest.raises(FailedPrecondition, match="not all ranks can push a training state"),
    ):
        loop.save(folder / "strict", **odd)
    loop.step()
    with push_on_save(MODEL, address, training=False) as hook:
        loop.save(folder)
        hook.wait(timeout=60)
    return heard.getvalue(), ChainedOptimizer.sharded_state_dict is before


def test_weights_are_pushed_alone_when_one_rank_cannot_push_a_training_state_and_megatron_keeps_what_was_not_pushed(
    service: RunningService, tmp_path: Path, hf_dir: Path
) -> None:
    seen = run_ranks(Parallel(tp=2), _odd, service.address, str(hf_dir), tmp_path / "run", timeout=240)
    run = tmp_path / "run"
    assert all((run / f"iter_000000{number}" / "metadata.json").is_file() for number in (0, 1))
    assert not any((run / "behind" / "iter_0000001").iterdir())
    assert (run / "behind" / "latest_checkpointed_iteration.txt").read_text() == "1"
    for log, undone in seen:
        assert all(f"Megatron writes {run}/iter_000000{number} itself" in log for number in (0, 1))
        assert f"{MODEL}: only the weights are pushed. not all ranks can push a training state" in log
        assert "rank 1: state.odd is a tests.engines.test_megatron_saved_states.Backend" in log
        assert undone
    with TrainerClient(service.address) as trainer:
        assert [version.step for version in trainer.versions(MODEL)] == [2, 1, 1, 0]
        assert [version.run for version in trainer.versions(f"{MODEL}:training")] == ["behind"]


def test_no_hook_is_made_that_would_let_nobody_keep_the_optimizer() -> None:
    with pytest.raises(InvalidArgument, match="the optimizer's state is not saved"):
        push_on_save(MODEL, training=False, megatron_saves=False)
