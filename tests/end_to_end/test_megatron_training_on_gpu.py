"""Training states of Megatron's distributed optimizer on GPUs: does training go on to the bit, with all that Megatron itself would save?

One process for each GPU, over NCCL, with nothing of Megatron's replaced.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU: Megatron's optimizers without their CPU replacements need one",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]
MODEL = "tests/llama"
CONFIG = tiny_config("llama", tied=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    CONFIG.save_pretrained(folder)
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder, dtype="bf16")
        yield running


Saved = dict[str, Tensor]


def goes_on(
    address: str, folder: str, rank: int, ranks: int, device: str, lane: str
) -> tuple[list[float | None], list[float | None], Saved, Saved]:
    """Losses after a push and those after a restore, and what Megatron would have saved at either."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(rank)
        torch.set_default_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/job-{lane}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    parallel = Parallel(dp=ranks)
    first, second = (
        TrainingRank(CONFIG, parallel, distributed=True, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)
    )
    with TrainerClient(address, lane=lane) as trainer:
        for number in range(3):
            first.step(number)
        before = wholes([first.own_state()])
        handle = trainer.push(MODEL, first.sharded_state_dict(), step=3, run=lane, optimizer=first.optimizer)
        expected = [first.step(number) for number in range(3, 8)]
        assert handle.training is not None
        version = handle.training.wait(timeout=100).number
        trainer.restore(MODEL, second.sharded_state_dict(), optimizer=second.optimizer, version=version)
    after = wholes([second.own_state()])
    losses = [second.step(number) for number in range(3, 8)]
    dist.destroy_process_group()
    return expected, losses, before, after


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_training_on_gpus_goes_on_to_the_bit(service: RunningService, tmp_path: Path, lane: str) -> None:
    ranks = torch.cuda.device_count()
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(goes_on, service.address, str(tmp_path), rank, ranks, "cuda", lane)
            for rank in range(ranks)
        ]
        results = [job.result(timeout=300) for job in jobs]
    for expected, losses, before, after in results:
        assert None not in expected
        assert losses == expected
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
