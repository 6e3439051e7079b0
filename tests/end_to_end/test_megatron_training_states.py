"""Does training of Megatron-core models go on from a training state: to the bit on as many ranks, with all of it at
another parallelism?
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.megatron_loops import (
    Case,
    check_that_a_manager_brings_back_the_last,
    check_that_it_goes_on_after_kills,
    register,
)
from tests.support.megatron_ranks import run_ranks
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel

GOES_ON = [
    (Case("llama", Parallel(tp=2, pp=2, dp=2), False), [Parallel(pp=2, dp=4), Parallel(tp=4)]),
    (Case("llama", Parallel(tp=2, dp=2), True), [Parallel(tp=4), Parallel(pp=2, dp=3)]),
    (Case("qwen2", Parallel(pp=2, dp=2), True), [Parallel(tp=2, pp=2), Parallel(dp=3)]),
    (Case("qwen3_moe", Parallel(dp=4, ep=2), False), [Parallel(dp=4, ep=4), Parallel(dp=2, ep=2)]),
    (Case("qwen3_moe", Parallel(dp=4, ep=2), True, "float32"), [Parallel(dp=4, ep=4), Parallel(dp=2)]),
]
MANAGED = [Case("llama", Parallel(tp=2, dp=2), True), Case("qwen2", Parallel(pp=2), False)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for case in {case.name: case for case, _ in GOES_ON}.values():
                register(trainer, case, tmp_path_factory.mktemp(case.family))
        yield running


@pytest.mark.parametrize(
    ("case", "others"),
    GOES_ON,
    ids=["dense", "dense, distributed", "tied over stages, distributed", "experts", "experts, distributed"],
)
def test_training_goes_on_after_all_ranks_were_killed(
    service: RunningService, tmp_path: Path, case: Case, others: list[Parallel]
) -> None:
    check_that_it_goes_on_after_kills(run_ranks, service.address, tmp_path, case, others)


@pytest.mark.parametrize("case", MANAGED, ids=["distributed", "plain"])
def test_a_manager_saves_every_step_while_training_goes_on_and_brings_back_the_last(
    service: RunningService, tmp_path: Path, case: Case
) -> None:
    check_that_a_manager_brings_back_the_last(run_ranks, service.address, tmp_path, case)
