"""Does a service or a rank that is killed at any moment leave the newest complete training state, and can it be
restored whole?

All that a step pushes holds the step's number: parameters, moments, both ranks' values. ``WEIGHBRIDGE_STATE_KILLS``
says how often something is killed, ``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forked import forking
from tests.support.killable_service import KillableService
from tests.support.rounds import first_seed, rounds
from tests.support.waiting import eventually
from weighbridge import NotFound, TrainerClient, VersionState, WeighbridgeError
from weighbridge._core.references import training_of

KILLS = rounds("STATE_KILLS")
SEED = first_seed()
MODEL = "acme/states"
RANKS = 2
LONGEST_LIFE = 0.6
_JOIN_SECONDS = 60.0


def trainer_at(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose every element is the step's number."""
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(step)
            moments = {name: torch.full_like(parameter, step) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return module, optimizer


def numbers_in(module: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """All numbers that they hold."""
    held = [*module.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return {number for each in held for number in each.detach().unique().tolist()}


def push_on(address: str, rank: int, first: int, life: int, told: str, lane: str) -> None:
    """Push step after step until the service is gone or the other rank is; note which states have become durable."""
    options: dict[str, Any] = {"rank": rank, "world_size": RANKS, "run": f"life-{life}"}
    with suppress(WeighbridgeError), TrainerClient(address, retry_seconds=0.2, lane=lane) as client:
        for step in count(first):
            module, optimizer = trainer_at(step)
            handle = client.push_state_dict(
                MODEL,
                module,
                step=step,
                optimizer=optimizer,
                state={"step": step},
                rank_state={"own": [rank, step]},
                until="optimizer_step" if step % 2 else None,
                **options,
            )
            handle.copied()
            assert handle.training is not None
            handle.training.copied()
            if step % 3 == 0:  # otherwise the next one begins while this one is being published
                handle.training.wait(VersionState.DURABLE, timeout=30)
                with Path(told).open("a") as notes:
                    notes.write(f"{step}\n")


def restored(address: str, rank: int) -> int:
    """The step of the newest state, which a rank of a new job is filled with; all that it holds is of that step. 0 if
    there is none.
    """
    module, optimizer = trainer_at(-1)
    state: dict[str, Any] = {"step": None}
    own: dict[str, Any] = {"own": None}
    with TrainerClient(address, retry_seconds=10) as client:
        try:
            version = client.restore_state_dict(
                MODEL,
                module,
                optimizer=optimizer,
                state=state,
                rank_state=own,
                rank=rank,
                world_size=RANKS,
            )
        except NotFound:
            return 0
        assert not client.verify(training_of(MODEL), version.number).problems
    step = version.step
    assert numbers_in(module, optimizer) == {float(step)}
    assert (state["step"], own["own"]) == (step, [rank, step])
    return step


def _has_grown(file: Path, size: int) -> bool:
    return file.stat().st_size > size


@pytest.mark.timeout(120 + 30 * KILLS)
@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_the_newest_complete_state_is_restored_whole_whatever_is_killed(tmp_path: Path, lane: str) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    (tmp_path / "config.json").write_text("{}")
    told = tmp_path / "durable"
    told.touch()
    socket = {"local_socket": str(tmp_path / "lane.sock")} if lane == "local" else {}
    # longer than one rank is later than the other on a machine that has other work, as both end with a version that is
    # given up
    service = KillableService(tmp_path / "store", receive_timeout=20.0, **socket)
    service.start()
    newest = 0
    try:
        with TrainerClient(service.address) as client:
            client.register_model(MODEL, tmp_path, tensors=trainer_at(0)[0], weight_map=False)
        for life in range(max(KILLS // 2, 1)):
            arguments = (newest + 1, life, str(told), lane)
            ranks = [
                forking().Process(target=push_on, args=(service.address, rank, *arguments), daemon=True)
                for rank in range(RANKS)
            ]
            for each in ranks:
                each.start()
            begun = told.stat().st_size
            if not life or chance.random() < 0.5:  # the others are cut off wherever they are
                eventually(partial(_has_grown, told, begun))
            time.sleep(chance.uniform(0.0, LONGEST_LIFE))
            victim = chance.choice(["service", "rank", "ranks", "all"])
            if victim in ("service", "all"):
                service.kill()
            for each in ranks[: {"service": 0, "rank": 1}.get(victim, RANKS)]:
                each.kill()
            if victim in ("service", "all"):
                service.start()
            time.sleep(chance.uniform(0.0, 0.2))
            for each in ranks:
                each.kill()
                each.join(_JOIN_SECONDS)
            durable = max(map(int, told.read_text().split()), default=0)
            steps = {restored(service.address, rank) for rank in range(RANKS)}
            # what was on its way may become durable between the two
            assert min(steps) >= max(durable, newest), (victim, steps, durable, newest)
            newest = max(steps)
        assert newest
    finally:
        service.kill()
