"""Do NeMo-RL's calls, in the order in which its synchronizer makes them, bring each refit's weights to all rollouts?

NeMo-RL is in no registry. Its base class is stood in for by the calls that it names, of 2026-08 (7ea279a); workers are
threads, each with an event loop of its own for each call, as vLLM's workers have.
"""

from __future__ import annotations

import abc
import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient, VersionFailed, WeighbridgeError

MODEL = "tests/nemo"
BUCKET = 1 << 20
Weights = list[tuple[str, Tensor]]


class BaseEngine(abc.ABC):
    """The abstract methods of NeMo-RL's ``CheckpointEngine``."""

    cleanup_after_load = True

    @abc.abstractmethod
    def prepare(self) -> Any: ...

    @abc.abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abc.abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None: ...  # noqa: B027  # as NeMo-RL's

    @abc.abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abc.abstractmethod
    def receive_weight_batches(self) -> Any: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As NeMo-RL's ``create_checkpoint_engine``."""
    base = ModuleType("nemo_rl.utils.checkpoint_engines.base")
    base.CheckpointEngine = BaseEngine  # type: ignore[attr-defined]
    parts = base.__name__.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "weighbridge.integrations.nemo_rl", raising=False)
    from weighbridge.integrations.nemo_rl import WeighbridgeCheckpointEngine

    return WeighbridgeCheckpointEngine


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as running:
        yield running


class Synchronizer:
    """The calls of NeMo-RL's, on two policy workers and two rollouts."""

    def __init__(self, make: Callable[..., Any], **said: Any) -> None:
        self._policy = [make(bucket_size=BUCKET, release_after_refit=False, **said) for _ in range(2)]
        self._rollouts = [make(bucket_size=BUCKET, release_after_refit=False, **said) for _ in range(2)]

    def begin(self) -> None:
        metadata = [
            {**engine.prepare(), "rank": rank}
            for side in (self._policy, self._rollouts)
            for rank, engine in enumerate(side)
        ]
        sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
        for rank in (1, 0):
            self._policy[rank].init_policy_process_group(worker_rank=rank, **sizes)
            self._rollouts[rank].init_rollout_process_group(rollout_rank=rank, **sizes)

    def refit(self, weights: Weights) -> list[list[Weights] | WeighbridgeError | None]:
        """The result of each policy worker and then of each rollout: the weights received, or the error."""

        async def received(engine: Any) -> list[Weights]:
            return [
                [(name, tensor.clone()) for name, tensor in batch] async for batch in engine.receive_weight_batches()
            ]

        def done(call: Callable[[], Any]) -> Any:
            try:
                return asyncio.run(call())
            except WeighbridgeError as error:
                return error

        calls = [
            *(lambda engine=engine: engine.send_weights(iter(weights)) for engine in self._policy),
            *(lambda engine=engine: received(engine) for engine in self._rollouts),
        ]
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(done, calls))

    def end(self) -> None:
        for engine in (*self._policy, *self._rollouts):
            engine.finalize()


def test_each_refit_reaches_all_rollouts_in_batches_also_after_one_that_failed(
    service: RunningService, make: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny_config("qwen3", tied=False, hidden_size=256, intermediate_size=512)
    config.save_pretrained(tmp_path / "hf")
    weights = list(tiny_model(config, seed=5).state_dict().items())
    job = Synchronizer(
        make, model=MODEL, server=service.address, hf_dir=str(tmp_path / "hf"), dtype="fp32", device="cpu"
    )
    for _ in range(2):  # as with release_after_refit
        job.begin()
        for factor in (1.0, -2.0):
            scaled = [(name, tensor * factor) for name, tensor in weights]
            *sent, first, second = job.refit(scaled)
            assert sent == [None, None]
            for found in (first, second):
                assert isinstance(found, list)
                assert len(found) > 1
                assert all(len(batch) == 1 or sum(t.nbytes for _, t in batch) <= BUCKET for batch in found)
                pulled = dict(pair for batch in found for pair in batch)
                assert pulled.keys() == dict(weights).keys()
                assert all(torch.equal(pulled[name], tensor) for name, tensor in scaled)
        failed = job.refit(weights[:-1])
        assert all(isinstance(each, WeighbridgeError) for each in failed)
        assert all(isinstance(each, VersionFailed) and weights[-1][0] in str(each) for each in failed[2:])
        *_, after = job.refit(weights)
        assert isinstance(after, list)
        job.end()
    with TrainerClient(service.address) as trainer:
        assert [version.step for version in trainer.versions(MODEL)] == [8, 6, 5, 4, 2, 1]
