"""A rank that is refused: are the other ranks of the push told at once, whether they wait or come later, and can the
step be pushed again?
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge.errors import InvalidArgument, LayoutError, VersionFailed
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.push.refusals import Refusals

MODEL = "acme/tiny"
PATIENCE = 60.0
"""Seconds, a fraction of what ranks wait for one that does not come."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), drain_seconds=0.1) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_files(MODEL, source.files)
        yield running


@pytest.fixture
def ranks(service: RunningService) -> Iterator[list[TrainerClient]]:
    with TrainerClient(service.address) as one, TrainerClient(service.address) as other:
        yield [one, other]


def weights(source: TinyModel) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}


def push(ranks: list[TrainerClient], rank: int, state: Any, step: int, **said: Any) -> int:
    handle = ranks[rank].push_state_dict(MODEL, state, step=step, rank=rank, world_size=2, **said)
    return handle.wait(timeout=PATIENCE).number


def test_a_rank_that_waits_is_told_of_one_that_is_refused_before_it_asks(
    ranks: list[TrainerClient], source: TinyModel
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(push, ranks, 0, weights(source), 1)
        eventually(lambda: any(v.step == 1 for v in ranks[1].versions(MODEL, include_invisible=True)))
        with pytest.raises(LayoutError, match="no such tensor"):
            push(ranks, 1, {**weights(source), "model.norm.weigh": torch.ones(2)}, 1)
        with pytest.raises(VersionFailed, match=rf"(?s){MODEL}@\d+ was given up: rank 1 was refused:.*norm.weigh"):
            waiting.result(PATIENCE)


def test_a_rank_that_comes_later_is_told_once_and_all_can_push_the_step_again(
    ranks: list[TrainerClient], source: TinyModel
) -> None:
    with pytest.raises(LayoutError):
        push(ranks, 1, {"model.norm.weight": torch.ones(3)}, 2)
    with pytest.raises(VersionFailed, match="rank 1 was refused"):
        push(ranks, 0, weights(source), 2)
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda rank: push(ranks, rank, weights(source), 2), range(2)))
    assert numbers[0] == numbers[1]


def test_a_rank_that_is_about_to_open_the_version_when_another_is_refused_is_told(
    service: RunningService, ranks: list[TrainerClient], source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener, refused = service.service.intake.opener, threading.Event()
    room_for = opener._room_for

    def room(model: RegisteredModel) -> int:
        """Called once it is known that the version is not open yet."""
        if not refused.is_set():
            refused.set()
            with pytest.raises(LayoutError):
                push(ranks, 1, {"model.norm.weight": torch.ones(3)}, 12)
        return room_for(model)

    monkeypatch.setattr(opener, "_room_for", room)
    with pytest.raises(VersionFailed, match="rank 1 was refused"):
        push(ranks, 0, weights(source), 12)
    assert refused.is_set()
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda rank: push(ranks, rank, weights(source), 12), range(2)))
    assert numbers[0] == numbers[1]


def test_ranks_that_are_all_refused_begin_anew_at_once(ranks: list[TrainerClient], source: TinyModel) -> None:
    for rank in range(2):
        with pytest.raises(LayoutError):
            push(ranks, rank, {"nothing.like.it": torch.ones(3)}, 3)
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda rank: push(ranks, rank, weights(source), 3), range(2)))
    assert numbers[0] == numbers[1]
    tried = [v for v in ranks[0].versions(MODEL, include_invisible=True) if v.step == 3]
    assert [version.state.given_up for version in tried] == [False, True]


def test_a_job_that_is_started_again_is_told_of_the_refusal_for_seconds_and_none_of_its_ranks_waits(
    service: RunningService,
    ranks: list[TrainerClient],
    source: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(service.service.intake.opener, "refusals", Refusals(10.0, lambda: now[0]))
    with pytest.raises(LayoutError):
        push(ranks, 1, {"model.norm.weight": torch.ones(3)}, 5)
    now[0] = 9.0
    with TrainerClient(service.address) as one, TrainerClient(service.address) as other:
        for rank in (1, 0):
            with pytest.raises(VersionFailed, match="rank 1 was refused"):
                push([one, other], rank, weights(source), 5)
    now[0] = 11.0
    with (
        TrainerClient(service.address) as one,
        TrainerClient(service.address) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        numbers = list(pool.map(lambda rank: push([one, other], rank, weights(source), 5), range(2)))
    assert numbers[0] == numbers[1]


def test_who_is_refused_for_a_rank_that_takes_part_already_ends_nobodys_push(
    service: RunningService, ranks: list[TrainerClient], source: TinyModel
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(push, ranks, 0, weights(source), 6)

        def declared() -> bool:
            found = [v for v in ranks[1].versions(MODEL, include_invisible=True) if v.step == 6]
            return any("rank 1" in waits and "rank 0" not in waits for v in found for waits in v.waits_for)

        eventually(declared)
        with TrainerClient(service.address) as stray, pytest.raises(LayoutError):
            push([stray], 0, {"model.norm.weight": torch.ones(3)}, 6)
        assert push(ranks, 1, weights(source), 6) == waiting.result(PATIENCE)


def test_ranks_that_give_different_metadata_all_fail_at_once(ranks: list[TrainerClient], source: TinyModel) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(push, ranks, 0, weights(source), 4, metadata={"reward": 0.5})
        eventually(lambda: any(v.step == 4 for v in ranks[1].versions(MODEL, include_invisible=True)))
        with pytest.raises(InvalidArgument, match="different metadata"):
            push(ranks, 1, weights(source), 4, metadata={"reward": 0.75})
        with pytest.raises(VersionFailed, match=r"(?s)rank 1 was refused: .*reward: 0\.5 and 0\.75"):
            waiting.result(PATIENCE)
    (version,) = [v for v in ranks[0].versions(MODEL, include_invisible=True) if v.step == 4]
    assert version.state is VersionState.ABORTED


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"metadata": "x"}, "the metadata is a str"),
        ({"metadata": [("reward", 1)]}, "the metadata is a list"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": None}, "step=None"),
        ({"world_size": -1}, "world_size=-1"),
        ({"model": f"{MODEL}@latest"}, f"push to '{MODEL}'"),
    ],
)
def test_arguments_that_are_none_are_named(
    ranks: list[TrainerClient], source: TinyModel, wrong: dict[str, Any], told: str
) -> None:
    good: dict[str, Any] = {"model": MODEL, "step": 9, "rank": 0, "world_size": 1}
    with pytest.raises(InvalidArgument) as raised:
        ranks[0].push_state_dict(state_dict_or_module=weights(source), **{**good, **wrong})
    assert told in str(raised.value)


def test_steps_of_numpy_are_steps_and_a_push_shows_itself(ranks: list[TrainerClient], source: TinyModel) -> None:
    handle = ranks[0].push_state_dict(MODEL, weights(source), step=np.int64(12), metadata={"ok": np.True_})
    version = handle.wait(timeout=PATIENCE)
    assert (version.step, version.metadata) == (12, {"ok": True})
    assert repr(handle) == f"<PushHandle {version.model}@{version.number}: {handle.stream_bytes} bytes, delivered>"
