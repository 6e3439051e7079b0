"""Are two jobs that push one model both warned, but not ranks of one job, nor a job that replaces a dead one?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge._clients import transport
from weighbridge._core.metadata import MAX_KEYS, OTHER_WRITER
from weighbridge._core.resources import Version
from weighbridge.errors import LayoutError, WeighbridgeError

MODEL = "acme/tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    store = tmp_path_factory.mktemp("store")
    with running_service(store, {MODEL: source.files}, drain_seconds=0.1) as running:
        yield running


class Job:
    """A job of two ranks, which the service takes for two processes."""

    def __init__(self, ranks: list[TrainerClient], source: TinyModel) -> None:
        self.ranks = ranks
        self._weights = {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}

    def push(self, step: int, said: Any = None) -> Version:
        """Push a step; only rank 1 gives metadata."""

        def of_rank(rank: int) -> Version:
            options = {"metadata": said} if said and rank else {}
            pushing = self.ranks[rank].push_state_dict
            return pushing(MODEL, self._weights, step=step, rank=rank, world_size=2, **options).wait(timeout=60)

        with ThreadPoolExecutor(2) as pool:
            return max(pool.map(of_rank, range(2)), key=lambda version: version.number)

    def fail(self, step: int) -> None:
        """Push a step in which one rank is refused."""
        with pytest.raises(LayoutError):
            self.ranks[0].push_state_dict(MODEL, {"wrong": torch.ones(1)}, step=step, rank=0, world_size=2)
        with pytest.raises(WeighbridgeError):
            self.ranks[1].push_state_dict(MODEL, self._weights, step=step, rank=1, world_size=2)


@pytest.fixture
def started(
    service: RunningService, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Job]]:
    with ExitStack() as stack:

        def start(process: str, run: str) -> Job:
            ranks = []
            for rank in range(2):
                monkeypatch.setattr(transport, "_process_id", lambda pid, rank=rank: f"{process}-{rank}")
                ranks.append(stack.enter_context(TrainerClient(service.address, run=run)))
            return Job(ranks, source)

        yield start


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "another job" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("run", ["second", "first"], ids=["of another run", "of the same run, still alive"])
def test_each_of_two_jobs_is_told_of_the_other_and_the_version_says_so(
    started: Callable[[str, str], Job], caplog: pytest.LogCaptureFixture, run: str
) -> None:
    one, other = started("a", "first"), started("b", run)
    assert not one.push(10).metadata
    assert not other.push(1).metadata  # it may be a job that took the place of the first one
    assert not _warned(caplog)
    for job, step, said in (
        (one, 11, f"{MODEL}@2, step 1 of run {run}"),
        (other, 2, f"{MODEL}@3, step 11 of run first"),
    ):
        pushed = job.push(step, {"reward": 0.5})
        assert pushed.metadata == {"reward": 0.5, OTHER_WRITER: said}
        warned = _warned(caplog)
        assert all(said in line for line in warned)
        assert sum("End one of them" in line for line in warned) == 2  # each rank


def test_nobody_is_told_of_a_job_before_it_or_of_its_own_processes_and_failures(
    started: Callable[[str, str], Job], source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    dead, again = started("a", "run"), started("b", "run")
    beside = started("b", "beside")  # of the same processes
    dead.push(1)
    dead.push(2)
    again.fail(2)
    for step, job in ((2, again), (3, beside), (4, again), (5, beside)):
        assert not job.push(step).metadata
    again.fail(6)
    assert not again.push(6).metadata
    assert not _warned(caplog)


def test_what_a_trainer_says_of_a_version_is_kept_where_there_is_no_room_for_more(
    started: Callable[[str, str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = started("a", "first"), started("b", "second")
    said = {f"key{number}": number for number in range(MAX_KEYS)}
    one.push(1)
    other.push(1)
    assert one.push(2, said).metadata == said
    assert any(record.name.endswith("opener") and "another job" in record.getMessage() for record in caplog.records)
