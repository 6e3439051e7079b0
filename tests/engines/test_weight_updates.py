"""Do the two sides of an update find each other by its ticket, and does each learn its outcome?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge import (
    DeadlineExceeded,
    FailedPrecondition,
    LayoutError,
    NotFound,
    TrainerClient,
    Version,
    VersionFailed,
)
from weighbridge.integrations import weight_updates
from weighbridge.integrations.trl import WeighbridgeTransfer
from weighbridge.integrations.weight_updates import (
    TICKET,
    UpdateReceiver,
    UpdateSender,
    UpdateSettings,
    WeightUpdate,
)

MODEL = "tests/updates"
CPU = torch.device("cpu")
RANKS = 2
Weights = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return list(tiny_model(tiny_config("qwen3", tied=False), seed=5).state_dict().items())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpdateSettings]:
    folder = tmp_path_factory.mktemp("updates")
    tiny_config("qwen3", tied=False).save_pretrained(folder / "hf")
    with running_service(folder / "store") as running:
        source = UpdateSettings(
            MODEL, running.address, retry_seconds=5.0, run="tests", hf_dir=folder / "hf", dtype="fp32"
        )
        for _ in range(2):  # as each process of a job does, in any order
            UpdateSender(source).register()
        yield source


def send(source: UpdateSettings, update: WeightUpdate, of_ranks: list[Weights], step: int | None = None) -> list[str]:
    """The error of each rank; empty where there is none."""

    def of(rank: int) -> str:
        try:
            handle = UpdateSender(source).send(
                update, of_ranks[rank], step=step, rank=rank, ranks=RANKS, buffer_bytes=1 << 21
            )
            handle.wait("ready", timeout=60)
        except (LayoutError, VersionFailed) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of, range(RANKS)))


async def received(source: UpdateSettings, update: WeightUpdate, within: float = 60) -> dict[str, Tensor]:
    receiver = UpdateReceiver(source, timeout=within)
    return {name: tensor.clone() async for name, tensor in receiver.receive(update, CPU, lambda: False)}


def test_what_ranks_gather_together_is_taken_to_the_end_if_the_training_step_cannot_be_told() -> None:
    def step() -> int:
        raise AttributeError("there is no trainer yet")

    weights = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    with pytest.raises(AttributeError, match="no trainer"):
        WeighbridgeTransfer(MODEL, [], "127.0.0.1:9", step=step).send_weights(weights)
    assert list(weights) == []


def test_workers_that_wait_get_the_update_that_they_were_told_of(source: UpdateSettings, weights: Weights) -> None:
    updates = [WeightUpdate.new() for _ in range(3)]

    async def main() -> list[dict[str, Tensor]]:
        waiting = [asyncio.create_task(received(source, update)) for update in updates]
        for index in (2, 0, 1):
            scaled = [(name, tensor * index) for name, tensor in weights]
            assert await asyncio.to_thread(send, source, updates[index], [scaled] * RANKS) == ["", ""]
        return await asyncio.gather(*waiting)

    for index, found in enumerate(asyncio.run(main())):
        assert found.keys() == dict(weights).keys()
        assert all(torch.equal(found[name], tensor * index) for name, tensor in weights)
    newest = asyncio.run(received(source, WeightUpdate("", "live")))
    assert all(torch.equal(newest[name], tensor) for name, tensor in weights)


def test_workers_are_told_why_an_update_fails_and_get_nothing(source: UpdateSettings, weights: Weights) -> None:
    update = WeightUpdate.new()
    short = weights[:-1]

    async def main() -> list[str]:
        waiting = asyncio.create_task(received(source, update))
        raised = await asyncio.to_thread(send, source, update, [short, short])
        with pytest.raises(VersionFailed, match=weights[-1][0]):
            await waiting
        return raised

    assert all(weights[-1][0] in said for said in asyncio.run(main()))


def test_ranks_wait_for_the_one_that_registers_the_model(source: UpdateSettings, tmp_path: Path) -> None:
    other = replace(source, model="tests/later")
    with pytest.raises(NotFound, match="tests/later"):
        UpdateSender(other).wait_registered(0.1)
    tiny_config("qwen3", tied=False).save_pretrained(tmp_path)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(UpdateSender(other).wait_registered, 60)
        UpdateSender(replace(other, hf_dir=tmp_path)).register()
        waiting.result(60)


def test_workers_do_not_wait_for_ranks_that_never_come(source: UpdateSettings) -> None:
    with pytest.raises(DeadlineExceeded, match=f"have not begun to push {MODEL} within 0.2 s"):
        asyncio.run(received(source, WeightUpdate.new(), within=0.2))


@pytest.mark.parametrize("found", [False, True])
def test_an_update_that_is_superseded_is_waited_for_no_longer(
    source: UpdateSettings, weights: Weights, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_updates, "_LOOK_SECONDS", 0.2)
    update, newer = WeightUpdate.new(), asyncio.Event()

    def newest() -> Version:
        return trainer.versions(MODEL, include_invisible=True, limit=1)[0]

    def begun() -> bool:
        found = trainer.versions(MODEL, include_invisible=True, limit=1)
        return bool(found) and found[0].metadata.get(TICKET) == update.ticket

    async def main() -> None:
        receiving = UpdateReceiver(source, timeout=60).receive(update, CPU, newer.is_set)
        waiting = asyncio.ensure_future(anext(receiving))
        if found:  # one rank has come, and the other one never does
            coming = asyncio.to_thread(
                UpdateSender(source).send, update, weights, step=1, rank=0, ranks=RANKS, buffer_bytes=1 << 21
            )
            alone = asyncio.ensure_future(coming)
            await asyncio.to_thread(eventually, begun)
        newer.set()
        with pytest.raises(FailedPrecondition, match="a newer one has begun"):
            await waiting
        if found:
            trainer.abort(MODEL, newest().number)
            with pytest.raises(VersionFailed):
                await alone

    with TrainerClient(source.server) as trainer:
        asyncio.run(main())
