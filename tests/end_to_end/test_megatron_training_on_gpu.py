"""Does training with Megatron's distributed optimizer on GPUs resume bit for bit, with all the state that Megatron
itself would save?

One process for each GPU, over NCCL. All GPUs are used; with one, nothing is cut.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_loops import (
    Case,
    check_that_a_manager_brings_back_the_last,
    check_that_it_goes_on_after_kills,
    register,
)
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_demo.ranks import RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU: Megatron's optimizers without their CPU replacements need one",
    ),
    pytest.mark.skipif(importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"),
]
GPUS = max(1, torch.cuda.device_count())
SEVERAL = pytest.mark.skipif(GPUS == 1, reason="there is one GPU only")
DENSE = Case("llama", Parallel(dp=GPUS), True)
OTHERS = [Parallel(tp=GPUS), Parallel(pp=GPUS)] if GPUS > 1 else []
CUT = Case("llama", Parallel(tp=GPUS), True, lane="grpc")
EXPERTS = Case("qwen3_moe", Parallel(dp=GPUS, ep=GPUS), True, "float32")


def _on_gpu(parallel: Parallel, rank: int, store_path: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on one rank with its own GPU, with no part of Megatron replaced."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    # a routine of Transformer Engine that routers ask for without having imported it
    moe_utils.te_general_gemm = None
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # or experts' outputs are added up in any order
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store_path}", rank=rank, world_size=parallel.world_size
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        create_gloo_process_groups=False,
    )
    result = fn(rank, *args)
    dist.destroy_process_group()
    return result


def run_ranks(parallel: Parallel, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """As `tests.support.megatron_ranks.run_ranks`, on GPUs: by processes that are not forked, which CUDA refuses."""
    size = parallel.world_size
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
        ProcessPoolExecutor(size, multiprocessing.get_context("spawn")) as pool,
    ):
        jobs = [pool.submit(_on_gpu, parallel, rank, f"{folder}/store", fn, args) for rank in range(size)]
        try:
            return [job.result(timeout=timeout) for job in jobs]
        except BrokenProcessPool as error:
            raise RankError("a rank died") from error


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for case in (DENSE, EXPERTS):
                register(trainer, case, tmp_path_factory.mktemp(case.family))
        yield running


@pytest.mark.parametrize(
    ("case", "others"),
    [
        pytest.param(DENSE, OTHERS, id="dense, local lane"),
        pytest.param(CUT, [Parallel(dp=GPUS)], id="dense, cut, over gRPC", marks=SEVERAL),
        pytest.param(EXPERTS, [Parallel(dp=GPUS)], id="experts", marks=SEVERAL),
    ],
)
def test_training_on_gpus_goes_on_after_all_ranks_were_killed(
    service: RunningService, tmp_path: Path, case: Case, others: list[Parallel]
) -> None:
    check_that_it_goes_on_after_kills(run_ranks, service.address, tmp_path, case, others)


@pytest.mark.parametrize("case", [DENSE, CUT], ids=["local lane", "cut, over gRPC"])
def test_a_manager_saves_every_step_on_gpus_and_brings_back_the_last(
    service: RunningService, tmp_path: Path, case: Case
) -> None:
    check_that_a_manager_brings_back_the_last(run_ranks, service.address, tmp_path, case)
