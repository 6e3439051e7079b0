"""Pushes with ``until``: is what arrives what the trainer held when it pushed, although it trained on at once?

Copies made in this process when it pushed are the independent answer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.services import RunningService, running_service
from tests.support.training_states import same_bits
from weighbridge import CheckpointManager, EngineClient, Layout, Shard, TensorSpec, TrainerClient, errors
from weighbridge._clients.pushing import _PUSHES_AT_ONCE
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._trainers.copies_until_step import CopyingBehind, StepGate
from weighbridge._trainers.states.steady import steady_until_step

MODEL = "tests/steps"
STEP_SECONDS = 60.0


class Trainer:
    """A loop whose forward changes buffers, and whose step changes everything else."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 16))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.randn(8, 64)).square().sum().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def held(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return deepcopy((self.module.state_dict(), self.optimizer.state_dict()))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def assert_alike(found: tuple[dict[str, Tensor], dict[str, Any]], expected: tuple[Any, Any]) -> None:
    assert found[0].keys() == expected[0].keys()
    assert all(same_bits(found[0][name], expected[0][name]) for name in expected[0])
    for index, state in expected[1]["state"].items():
        assert all(same_bits(found[1]["state"][index][name], state[name]) for name in state)


@pytest.fixture(params=["local", "grpc"])
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    lane = {"local_socket": str(tmp_path / "lane.sock")} if request.param == "local" else {}
    with running_service(tmp_path / "store", **lane) as running:
        yield running


@pytest.fixture
def client(service: RunningService, tmp_path: Path) -> Iterator[TrainerClient]:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with TrainerClient(service.address) as client:
        client.register_model(MODEL, tmp_path / "hf", tensors=Trainer().module, weight_map=False)
        yield client


def test_versions_hold_what_was_there_before_the_steps_that_followed(client: TrainerClient) -> None:
    trainer = Trainer()
    expected = {}
    for step in range(4):
        trainer.train()
        handle = client.push_state_dict(
            MODEL, trainer.module, step=step, optimizer=trainer.optimizer, until="optimizer_step"
        )
        expected[handle.number] = trainer.held()
        assert handle.training is not None
        handle.training.wait("ready", timeout=60)
        trainer.train()
    for number, held in expected.items():
        with EngineClient(client.server) as engine:
            found = dict(engine.pull(MODEL, number))
        assert all(same_bits(found[name], tensor) for name, tensor in held[0].items())
        other = Trainer(seed=1)
        client.restore_state_dict(MODEL, other.module, optimizer=other.optimizer, version=number)
        assert_alike(other.held(), held)


def test_a_manager_keeps_each_step_as_it_was_while_the_loop_goes_on(client: TrainerClient) -> None:
    trainer = Trainer()
    checkpoints = CheckpointManager(client, MODEL, trainer.module, trainer.optimizer, until="optimizer_step")
    expected = {}
    for step in range(4):
        trainer.train()
        expected[checkpoints.save(step).number] = trainer.held()
    trainer.train()
    saved = checkpoints.wait(timeout=60)
    assert saved is not None
    assert saved.step == 3
    for number, held in expected.items():
        other = Trainer(seed=1)
        CheckpointManager(client, MODEL, other.module, other.optimizer).restore(number)
        assert_alike(other.held(), held)


def test_weights_alone_wait_for_the_step_of_the_optimizer_that_is_named(client: TrainerClient) -> None:
    trainer = Trainer()
    handle = client.push_state_dict(MODEL, trainer.module, step=1, until=trainer.optimizer)
    expected = trainer.held()[0]
    trainer.train()
    assert handle.copied(timeout=0)
    assert handle.training is None
    handle.wait("ready", timeout=60)
    with EngineClient(client.server) as engine:
        assert all(same_bits(tensor, expected[name]) for name, tensor in engine.pull(MODEL, handle.number))


@pytest.mark.parametrize("until", ["optimizer_step", "backward", 5, []])
def test_what_names_no_optimizer_is_refused(client: TrainerClient, until: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="optimizer"):
        client.push_state_dict(MODEL, Trainer().module, step=1, until=until)
    assert client.push_state_dict(MODEL, Trainer().module, step=1).wait("ready", timeout=60)


def test_a_push_that_fails_keeps_no_step(client: TrainerClient) -> None:
    trainer = Trainer()
    trainer.train()
    with pytest.raises(errors.LayoutError):
        client.push_state_dict(MODEL, nn.Linear(3, 3), step=1, until=trainer.optimizer)
    client.delete_model(MODEL)
    with pytest.raises(errors.NotFound):
        client.push_state_dict(MODEL, trainer.module, step=2, optimizer=trainer.optimizer, until="optimizer_step")
    trainer.train()


def test_a_step_waits_for_copies_and_no_step_after_it() -> None:
    trainer, gate = Trainer(), StepGate()
    trainer.backward()
    before = trainer.held()[0]
    copying = [CopyingBehind(()), CopyingBehind(())]
    for each in copying:
        gate.hold(steady_until_step(trainer.optimizer).optimizers, each)
    thread = threading.Thread(target=trainer.optimizer.step)
    thread.start()
    copying[0].ended.set()
    thread.join(0.2)
    assert thread.is_alive()
    assert all(same_bits(trainer.module.state_dict()[name], before[name]) for name in before)
    with copying[1].made():
        pass
    thread.join(STEP_SECONDS)
    assert not thread.is_alive()
    trainer.train()  # nothing is left to be waited for


def test_a_wait_that_is_interrupted_is_made_by_the_next_step() -> None:
    trainer, gate, copying = Trainer(), StepGate(), CopyingBehind(())
    trainer.backward()
    before = trainer.held()[0]
    gate.hold([trainer.optimizer], copying)
    previous = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            trainer.optimizer.step()
    finally:
        signal.signal(signal.SIGALRM, previous)
    thread = threading.Thread(target=trainer.optimizer.step)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert all(same_bits(trainer.module.state_dict()[name], before[name]) for name in before)
    copying.ended.set()
    thread.join(STEP_SECONDS)
    assert not thread.is_alive()


def test_steps_of_several_threads_all_wait() -> None:
    trainers, gate, copying = [Trainer(), Trainer(1)], StepGate(), CopyingBehind(())
    for each in trainers:
        each.backward()
    gate.hold([each.optimizer for each in trainers], copying)
    threads = [threading.Thread(target=each.optimizer.step) for each in trainers]
    for each_thread in threads:
        each_thread.start()
        each_thread.join(0.2)
    assert all(each.is_alive() for each in threads)
    copying.ended.set()
    for each_thread in threads:
        each_thread.join(STEP_SECONDS)
    assert not any(each.is_alive() for each in threads)


def test_a_push_that_is_interrupted_while_others_are_on_their_way_keeps_no_step(
    client: TrainerClient,
) -> None:
    trainer = Trainer()
    push = partial(client.push_state_dict, MODEL, trainer.module, until=trainer.optimizer)
    slots = client._pushes.pusher._slots
    for _ in range(_PUSHES_AT_ONCE):
        slots.acquire()
    previous = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            push(step=1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    thread = threading.Thread(target=trainer.train, daemon=True)
    thread.start()
    thread.join(STEP_SECONDS)
    assert not thread.is_alive()
    assert not slots.acquire(blocking=False), "a slot was given back that the push did not have"
    slots.release(_PUSHES_AT_ONCE)
    push(step=2).wait("ready", timeout=60)


def test_copies_that_fail_keep_no_step() -> None:
    trainer, gate, copying = Trainer(), StepGate(), CopyingBehind(())
    gate.hold([trainer.optimizer], copying)
    with pytest.raises(RuntimeError, match="full"), copying.made():
        raise RuntimeError("full")
    trainer.train()


def test_parameters_and_moments_are_steady_and_buffers_are_not() -> None:
    trainer = Trainer()
    trainer.train()
    steady = steady_until_step(trainer.optimizer)
    held = [*trainer.module.parameters(), *trainer.optimizer.state[trainer.module[0].weight].values()]
    assert all(steady.settled(each) is each for each in held)
    buffers = list(trainer.module.buffers())
    settled = [steady.settled(each) for each in buffers]
    trainer.backward()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(settled, buffers, strict=True))
    assert not same_bits(settled[0], buffers[0])


def test_what_something_else_may_change_is_copied_once_for_weights_and_training_state() -> None:
    trainer, gate = Trainer(), StepGate()
    frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    copies = gate.until(trainer.optimizer, None)
    layout = Layout.stream([TensorSpec("frozen", dtypes.parse("f32"), (1000,))], [Shard("frozen", Box.whole((1000,)))])
    read = []
    for _ in range(2):
        shards, copying = copies.shards(layout, [frozen], StagingPool())
        copying.release()
        opened = shards.select([0], layout)
        assert isinstance(opened, TensorSource)
        read += opened._tensors
    assert read[0] is read[1]
    assert read[0].data_ptr() != frozen.data_ptr()


def test_a_push_that_is_interrupted_when_its_thread_has_begun_gives_its_slot_back_once(
    client: TrainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    client.push_state_dict(MODEL, trainer.module, step=1).wait("ready", timeout=60)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith(f"push-{MODEL}"):
            started.append(thread)
            thread.join(STEP_SECONDS)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.push_state_dict(MODEL, trainer.module, step=2)
    assert len(started) == 1
    slots = client._pushes.pusher._slots
    assert [slots.acquire(blocking=False) for _ in range(_PUSHES_AT_ONCE + 1)] == [True] * _PUSHES_AT_ONCE + [False]
    slots.release(_PUSHES_AT_ONCE)
    client.push_state_dict(MODEL, trainer.module, step=3).wait("ready", timeout=60)
