"""Do all ranks of an AReaL actor learn of a failure on one rank, at any point of an update, and is the next update
independent of it?

The actor's ranks are two of three of a real job over gloo, the service is real; AReaL's own parts are
`tests.support.areal_actors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support import areal_actors
from tests.support.areal_actors import FACTOR, MEMBERS, MODEL
from tests.support.forked import run_jobs
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_demo.ranks import gloo_job

pytestmark = [pytest.mark.timeout(300)]


class Place:
    """A service, and a model in a folder."""

    def __init__(self, service: RunningService, folder: Path, model: PreTrainedModel) -> None:
        self.service = service
        self.root = folder / "files"
        self.root.mkdir()
        self._hf_dir = folder / "hf"
        self.model = model
        model.save_pretrained(self._hf_dir)

    def updates(self, *faults: str) -> list[dict[str, Any]]:
        """The observations of the actor's ranks, with one update for each fault."""
        args = (self.service.address, str(self._hf_dir), str(self.root), self.model, faults)
        found = run_jobs([gloo_job(3, areal_actors.updates, *args)], timeout=200)[0]
        return [found[rank] for rank in MEMBERS]

    def steps(self) -> list[int | None]:
        """Of all versions, also of those that failed."""
        with TrainerClient(self.service.address) as client:
            return [version.step for version in client.versions(MODEL, include_invisible=True)]

    def check_loaded(self, first: dict[str, Any], number: int) -> None:
        """Check that rollouts have the weights of the ranks at an update, to the bit."""
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(first["loaded"][name], tensor * FACTOR**number), name


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    model = tiny_model(tiny_config("qwen3", tied=False, torch_dtype="bfloat16"), seed=7).bfloat16()
    with running_service(tmp_path / "store", receive_timeout=5.0) as service:
        yield Place(service, tmp_path, model)


@pytest.mark.parametrize(
    ("fault", "said"), [("no model", "WEIGHBRIDGE_MODEL does not name"), ("no service", "127.0.0.1:1")]
)
def test_a_rank_that_could_not_push_is_told_of_by_all_before_any_has_begun_to(
    place: Place, fault: str, said: str
) -> None:
    found = place.updates(fault, "")
    for rank in found:
        first, second = rank["raised"]
        assert first.startswith("RanksFailed: not all ranks can push their weights")
        assert "rank 1: " in first
        assert said in first
        assert second == ""
    assert place.steps() == [1]
    place.check_loaded(found[0], 1)


def test_a_rank_that_cannot_onload_is_told_of_by_all_at_each_update(place: Place) -> None:
    found = place.updates("no memory", "", "no memory", "")
    for rank in found:
        before, first, later, last = rank["raised"]
        assert first == last == ""
        assert before.startswith("RanksFailed: not all ranks can push their weights")
        assert later.startswith("RanksFailed: the weights were not pushed")
        assert all("rank 1: MemoryError: no memory to onload" in each for each in (before, later))
    place.check_loaded(found[0], 3)


def test_ranks_that_are_known_to_be_able_to_push_tell_each_other_only_how_it_went(place: Place) -> None:
    for rank in place.updates("", "", "no memory", "", ""):
        assert [bool(each) for each in rank["raised"]] == [False, False, True, False, False]
        assert rank["exchanges"] == [3, 2, 1, 3, 2]


def test_what_engines_may_still_read_stays_until_they_have_loaded_another_version(place: Place) -> None:
    first, second = place.updates("refuses", "hangs", "")
    assert first["raised"] == second["raised"]
    assert "rank 0: RuntimeError: refused" in first["raised"][0]
    assert "longer than 8 s to load the version" in first["raised"][1]
    assert first["raised"][2] == ""
    assert first["left"] == [1, 2, 0]
    assert len(set(first["folders"])) == 3
    assert second["folders"] == []
    place.check_loaded(first, 2)
