"""Does one line in a Megatron trainer push what it saves, and never harm the save?

The ranks save as Megatron-LM's training loop does (megatron/training/checkpointing.py): a state dict with the
iteration, the model, its optimizer and random states, a strategy that shares the work among replicas, content metadata.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.mortal_proxy import MortalProxy
from tests.support.reference import load_with_mbridge, tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge.integrations.guarded_pushes import follow
from weighbridge.integrations.megatron_saving import logger, push_on_save, step_of
from weighbridge_demo.megatron_cpu import Parallel, build_model

PARALLEL = Parallel(tp=2, dp=2)
FEW = Parallel(tp=2)
CONFIG = tiny_config("qwen2", tied=True)
PADDED_VOCABULARY = 144
NOBODY = "127.0.0.1:9"


class Trainer:
    """One rank of a training loop, its model and optimizer, which saves as Megatron-LM does."""

    def __init__(self, parallel: Parallel, config: PretrainedConfig, weights: dict[str, Tensor]) -> None:
        import multiprocessing
        import queue

        from megatron.core.dist_checkpointing.strategies import filesystem_async

        # Its writers are processes that report to a server process; ranks here are daemons, which may start none.
        filesystem_async._results_queue = queue.Queue()
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self.model = build_model(config, parallel, padded_vocab_size=PADDED_VOCABULARY)
        load_with_mbridge(self.model, weights, config)
        self.parallel = parallel
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.strategy: Any = None

    def scale(self, factor: float) -> None:
        """Change every weight in place."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def state_dict(self, iteration: int) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            optim_state_to_sharding_state,
        )

        rank = torch.distributed.get_rank()
        weights = self.model.sharded_state_dict()
        state = self.optimizer.state_dict()
        shards = get_param_id_to_sharded_param_map(weights, self.model.parameters())
        optim_state_to_sharding_state(state, shards, exclude_keys="step")
        rng = ShardedObject("rng_state", [rank], (self.parallel.world_size,), (rank,))
        return {
            "args": {"tensor_model_parallel_size": self.parallel.tp},
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "model": weights,
            "optimizer": state,
            "rng_state": rng,
        }

    def save(self, iteration: int, save_dir: str, **options: Any) -> Any:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        folder = f"{save_dir}/iter_{iteration:07d}"
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if self.strategy is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self.strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
        return dist_checkpointing.save(
            self.state_dict(iteration),
            folder,
            self.strategy,
            validate_access_integrity=True,
            preprocess_common_before_consistancy_check=None,
            content_metadata={"singleton_local_shards": False},
            **options,
        )


def _listen() -> io.StringIO:
    """The log of the hook from this call on."""
    heard = io.StringIO()
    logger = logging.getLogger("weighbridge")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(heard))
    return heard


@dataclass(frozen=True)
class Saved:
    """The report of one rank: version numbers by kind of save, and whether the hook restored everything that it
    replaced.
    """

    versions: dict[str, int]
    unhooked: bool
    log: str


def _train(
    rank: int, address: str, config: PretrainedConfig, weights: dict[str, Tensor], hf_dir: str, save_dir: str
) -> Saved:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    before = dist_checkpointing.save
    heard = _listen()
    trainer = Trainer(PARALLEL, config, weights)
    versions = {}
    with push_on_save("tests/saved", address, hf_dir=hf_dir, candidate=True) as hook:
        trainer.scale(-1)
        trainer.save(10, save_dir)
        versions["sync"] = hook.wait(timeout=60).number
        trainer.save(10, save_dir + "-not-to-be-kept")
        versions["sync again"] = hook.wait(timeout=60).number

        trainer.scale(2)
        request = trainer.save(20, save_dir, async_sharded_save=True)
        trainer.scale(5)  # the pushed tensors have been copied by now
        request.execute_sync()
        versions["async"] = hook.wait(timeout=60).number

        weights_only = trainer.model.sharded_state_dict()
        folder = Path(save_dir, "plain-30")
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(weights_only, str(folder))
        versions["plain"] = hook.wait(timeout=60).number
    unhooked = dist_checkpointing.save is before and serialization.save is before
    return Saved(versions, unhooked, heard.getvalue())


@dataclass(frozen=True)
class Training:
    """The results of a training: its ranks' reports, the folder with its checkpoints, and its initial weights."""

    address: str
    ranks: list[Saved]
    folder: Path
    weights: dict[str, Tensor]

    @property
    def all_weights(self) -> dict[str, Tensor]:
        """The weights with the tied output layer, which Megatron's loader asks for."""
        return {**self.weights, "lm_head.weight": self.weights["model.embed_tokens.weight"]}

    def pulled(self, what: str) -> dict[str, Tensor]:
        with EngineClient(self.address) as engine:
            return dict(engine.pull("tests/saved", self.ranks[0].versions[what]))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), drain_seconds=0.5) as running:
        yield running


@pytest.fixture(scope="module")
def training(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Training:
    model = tiny_model(CONFIG, seed=5)
    hf_dir = tmp_path_factory.mktemp("hf")
    CONFIG.save_pretrained(hf_dir)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    arguments = (service.address, CONFIG, weights, str(hf_dir), str(folder))
    ranks = run_ranks(PARALLEL, _train, *arguments, timeout=240)
    del weights["lm_head.weight"]
    return Training(service.address, ranks, folder, weights)


@pytest.mark.parametrize(("what", "factor"), [("sync", -1), ("async", -2), ("plain", -10)])
def test_what_is_saved_is_pushed_bit_for_bit(training: Training, what: str, factor: float) -> None:
    pulled = training.pulled(what)
    assert pulled.keys() == training.weights.keys()
    for name, tensor in pulled.items():
        assert torch.equal(tensor, factor * training.weights[name]), name


def test_the_ranks_make_one_version_of_each_step_with_the_steps_number(training: Training) -> None:
    assert [rank.versions for rank in training.ranks] == [training.ranks[0].versions] * PARALLEL.world_size
    with TrainerClient(training.address) as client:
        versions = client.versions("tests/saved")
    assert [version.step for version in reversed(versions)] == [10, 20, 30]
    assert training.ranks[0].versions["sync again"] == training.ranks[0].versions["sync"]
    assert all(f"(step {step}) is in the store" in training.ranks[0].log for step in (10, 20, 30))


def _load(rank: int, config: PretrainedConfig, weights: dict[str, Tensor], folder: str, factor: float) -> bool:
    from megatron.core import dist_checkpointing

    trainer = Trainer(FEW, config, weights)
    trainer.scale(factor)
    expected = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items() if tensor is not None}
    trainer.scale(7)
    loaded = dist_checkpointing.load({"model": trainer.model.sharded_state_dict()}, folder)
    found = {name: tensor for name, tensor in loaded["model"].items() if isinstance(tensor, Tensor)}
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items()) and len(found) > 4


def test_what_the_hook_says_of_versions_goes_for_each_of_them(training: Training) -> None:
    with EngineClient(training.address) as engine:
        pushed = {*training.ranks[0].versions.values()}
        versions = [version for version in engine.versions("tests/saved") if version.number in pushed]
        assert [version.held for version in versions] == [("candidate",)] * len(pushed)


def test_the_checkpoint_is_what_it_would_have_been(training: Training) -> None:
    folder = str(training.folder / "iter_0000010")
    assert all(run_ranks(FEW, _load, CONFIG, training.all_weights, folder, -1.0))


def test_the_hook_can_be_undone(training: Training) -> None:
    assert all(rank.unhooked for rank in training.ranks)


def _save_without_service(
    rank: int, address: str, config: PretrainedConfig, weights: dict[str, Tensor], save_dir: str, strict: bool
) -> str:
    heard = _listen()
    trainer = Trainer(FEW, config, weights)
    server = NOBODY if rank == 1 else address  # a failure on one rank fails the push of all
    with push_on_save("tests/saved", server, retry_seconds=0.5, strict=strict):
        trainer.save(40, save_dir)
    return heard.getvalue()


def test_a_push_that_fails_on_one_rank_is_logged_and_the_save_goes_on(training: Training, tmp_path: Path) -> None:
    arguments = (training.address, CONFIG, training.all_weights, str(tmp_path), False)
    for log in run_ranks(FEW, _save_without_service, *arguments):
        assert "tests/saved: what is saved in" in log
        assert "was not pushed; the save goes on. not all ranks can push" in log
        assert f"rank 1: the service at {NOBODY}" in log
    assert (tmp_path / "iter_0000040" / "metadata.json").is_file()
    with TrainerClient(training.address) as client:
        assert 40 not in {version.step for version in client.versions("tests/saved", include_invisible=True)}


def test_a_push_that_fails_ends_a_strict_save_before_anything_is_written(training: Training, tmp_path: Path) -> None:
    arguments = (training.address, CONFIG, training.all_weights, str(tmp_path), True)
    with pytest.raises(RankError, match="FailedPrecondition: not all ranks can push"):
        run_ranks(FEW, _save_without_service, *arguments)
    assert not any((tmp_path / "iter_0000040").iterdir())


def test_a_push_that_fails_behind_the_trainers_back_is_logged(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(CONFIG, seed=6).save_pretrained(tmp_path)
    proxy = MortalProxy(training.address)
    with TrainerClient(proxy.address, retry_seconds=0.5) as trainer:
        trainer.model("tests/saved")
        proxy.die_after(200_000)
        follow(trainer.push_folder("tests/saved", tmp_path), step=50, rank=1, logger=logger)
    assert "rank 1: the push of tests/saved@" in caplog.text
    assert "(step 50) has failed: the service at" in caplog.text


@pytest.mark.parametrize(
    ("state_dict", "folder", "step"),
    [({"iteration": 7}, "iter_0000009", 7), ({}, "iter_0000009", 9), ({}, "/runs/5/step-12", 12)],
)
def test_the_step_is_the_iteration_or_the_folders_number(state_dict: dict[str, Any], folder: str, step: int) -> None:
    assert step_of(state_dict, folder) == step
