"""Does any version change, or become visible without being one whole push, whatever happens to its writers?

Writers are processes that share memory with the service. They are stopped, killed, forked, closed and broken in the
middle of their copy, each run in one of these ways. During and after that other writers push, and every pull is
compared with the pushed tensors.

``WEIGHBRIDGE_WRITER_FAULTS=1000`` makes as many random runs; ``WEIGHBRIDGE_SEED`` chooses the first one's seed. With
``WEIGHBRIDGE_WRITER_FAULTS_DEVICE=cuda`` writers' tensors lie on a GPU, and half of the faults come while its copies
are under way.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import torch

from tests.support.raw_clients import tiny_folder
from tests.support.rounds import first_seed, rounds
from tests.support.services import RunningService, running_service
from tests.support.writer_faults import (
    DEVICE,
    FIRST_TOKEN,
    HIDDEN_SIZE,
    Child,
    Outcome,
    Push,
    WriterProcess,
    pattern,
    push_pattern,
    token_of,
    tokens_in,
)
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import Retention, VersionState

RUNS = rounds("WRITER_FAULTS")
FIRST_SEED = first_seed()
MODELS = ("acme/first", "acme/second")
KEPT = 2
IMAGE_BYTES = 630_784
"""Size of a version of `tiny_folder` with `HIDDEN_SIZE` in bytes: its one file, in whole pages."""
HELD = 6
"""Number of versions that are read in place after newer ones have come: a late write to their memory would show."""
MEMORY = 4 * (HELD + 1) * IMAGE_BYTES
"""Memory of a run in bytes, where one reader may keep `HELD` images: released memory is reused soon, and a leak would
fail later runs.
"""
READY_SECONDS = 10.0


class Watcher:
    """Records all pushes, and compares pulls with them.

    Args:
        address: of the service.
    """

    def __init__(self, address: str) -> None:
        self.admin = TrainerClient(address, lane="grpc")
        self._engines = itertools.cycle(EngineClient(address, lane=lane) for lane in ("grpc", "local"))
        self._local = EngineClient(address, lane="local")
        self._tokens = itertools.count(FIRST_TOKEN)
        self._steps = itertools.count(1)
        self._began: dict[int, str] = {}
        self._doomed: set[int] = set()
        self._versions: dict[tuple[str, int], int] = {}
        self._held: deque[tuple[str, int, dict[str, torch.Tensor]]] = deque(maxlen=HELD)

    def new_push(
        self, model: str, step: int | None = None, halts_at: float | None = None, *, under_way: bool = False
    ) -> Push:
        """A push of a step that was given, or of the next one."""
        step = next(self._steps) if step is None else step
        push = Push(model, step, next(self._tokens), halts_at, under_way)
        self._began[push.token] = model
        return push

    def failed(self, push: Push) -> None:
        """Record that no byte of this push may ever be visible."""
        self._doomed.add(push.token)

    def succeeded(self, push: Push, outcome: Outcome) -> None:
        """Record a push that had to succeed; wait until its version is visible, and keep views of it for a while."""
        assert (outcome.error, outcome.lane) == ("", "local")
        self.admin.wait_for(push.model, outcome.number, VersionState.READY, timeout=READY_SECONDS)
        self._is(push.model, outcome.number, push.token)
        self._held.append((push.model, outcome.number, dict(self._local.pull(push.model, outcome.number))))

    def made(self, trainer: TrainerClient, model: str) -> None:
        """Push from a client in this process; the push must succeed."""
        push = self.new_push(model)
        self.succeeded(push, push_pattern(trainer, push))

    def abort(self, model: str) -> None:
        """Abort the versions of a model that are being received."""
        for version in self.admin.versions(model, include_invisible=True):
            if version.state in (VersionState.OPEN, VersionState.RECEIVING):
                self.admin.abort(model, version.number)

    def look(self) -> None:
        """Compare all that can be pulled, and the views that are held, with what was pushed."""
        for model in MODELS:
            for version in self.admin.versions(model):
                self._compare(model, version.number, dict(next(self._engines).pull(model, version.number)))
        for held in self._held:
            self._compare(*held)

    def _compare(self, model: str, number: int, tensors: dict[str, torch.Tensor]) -> None:
        found = {name: tensor.numpy() for name, tensor in tensors.items()}
        token = token_of(next(iter(found.values())))
        self._is(model, number, token)
        expected = pattern(token)
        assert found.keys() == expected.keys()
        different = [name for name, array in expected.items() if found[name].tobytes() != array.tobytes()]
        others = set().union(*(tokens_in(found[name]) for name in different)) - {token}
        assert not different, f"{model}@{number} is push {token}, but for numbers of {others} in {different}"

    def _is(self, model: str, number: int, token: int) -> None:
        assert self._began.get(token) == model, f"{model}@{number} is of push {token}, which was of another"
        assert token not in self._doomed, f"{model}@{number} is push {token}, which has failed"
        known = self._versions.setdefault((model, number), token)
        assert known == token, f"{model}@{number} was push {known} and is push {token}"

    def close(self) -> None:
        self._held.clear()
        for client in (self.admin, self._local, next(self._engines), next(self._engines)):
            client.close()


class Run:
    """One fault of one writer, while another one pushes to the same model, or to both.

    Args:
        watcher: looks at what there is.
        address: of the service.
        dice: what is drawn.
    """

    def __init__(self, watcher: Watcher, address: str, dice: random.Random) -> None:
        self.watcher = watcher
        self.dice = dice
        self.model = dice.choice(MODELS)
        self._address = address
        self._stack = contextlib.ExitStack()
        self.writer, self.honest = self.new_writer(), self.new_writer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def new_writer(self) -> WriterProcess:
        """A further process, which is killed in the end."""
        writer = WriterProcess(self._address)
        self._stack.callback(writer.kill)
        return writer

    def fork(self, writer: WriterProcess) -> Child:
        """A child of a writer, which is ended with the run at the latest."""
        child = writer.fork()
        self._stack.callback(child.end)
        return child

    def halted(self, *, breaks: bool = False) -> Push:
        """A push of the faulty writer, in the middle of its copy; with ``breaks``, of which the rest can be broken."""
        halts_at = self.dice.uniform(0.05, 0.95)
        under_way = DEVICE != "cpu" and not breaks and self.dice.random() < 0.5
        push = self.watcher.new_push(self.model, halts_at=halts_at, under_way=under_way)
        self.writer.begin(push)
        return push

    def made(self, writer: WriterProcess, model: str = "", step: int | None = None) -> None:
        """A push that has to succeed."""
        push = self.watcher.new_push(model or self.model, step)
        writer.begin(push)
        self.watcher.succeeded(push, writer.ended())

    def others(self) -> None:
        """Pushes of the honest writer: two to the model, and some to either."""
        models = [self.model, self.model, *self.dice.choices(MODELS, k=self.dice.randrange(1, 4))]
        self.dice.shuffle(models)
        for model in models:
            self.made(self.honest, model)
        self.watcher.look()


def nothing_happens(run: Run) -> None:
    run.made(run.writer)
    run.others()


def stopped(run: Run) -> None:
    push = run.halted()
    run.writer.stop()
    run.watcher.abort(run.model)
    run.watcher.failed(push)
    run.others()
    run.others()  # enough pushes that memory released too early would be part of a visible version
    run.writer.resume()
    run.writer.go_on()
    run.watcher.look()
    assert run.writer.ended().error
    run.watcher.look()
    run.made(run.writer)


def killed(run: Run) -> None:
    push = run.halted()
    run.writer.kill()
    run.watcher.failed(push)
    if run.dice.random() < 0.5:
        run.watcher.abort(run.model)
    again = run.watcher.new_push(run.model, push.step)
    run.honest.begin(again)
    outcome = run.honest.ended()
    if outcome.error:  # the push waits for the dead writer's version until that is aborted
        run.watcher.failed(again)
        run.watcher.abort(run.model)
        run.made(run.honest, step=push.step)
    else:
        run.watcher.succeeded(again, outcome)
    run.others()
    run.writer = run.new_writer()
    run.made(run.writer)


def forked_and_ended(run: Run) -> None:
    push = run.halted()
    child = run.fork(run.writer)
    if run.dice.random() < 0.5:
        run.others()
    run.writer.go_on()
    time.sleep(run.dice.uniform(0.0, 0.3))
    run.watcher.look()
    child.end()
    run.watcher.succeeded(push, run.writer.ended())
    run.watcher.look()
    run.made(run.writer)


def forked_and_killed(run: Run) -> None:
    push = run.halted()
    child = run.fork(run.writer)
    run.writer.kill()
    run.watcher.failed(push)
    run.watcher.abort(run.model)
    run.others()
    child.end()
    run.others()


def closed(run: Run) -> None:
    push = run.halted()
    run.writer.close_client()
    run.watcher.abort(run.model)
    run.watcher.failed(push)
    run.others()
    run.others()  # as above
    run.writer.go_on()
    run.watcher.look()
    assert run.writer.ended().error
    run.watcher.look()
    run.made(run.writer)


def closed_and_ended(run: Run) -> None:
    push = run.halted()
    run.writer.close_client()
    run.writer.go_on()
    outcome = run.writer.ended()
    if not outcome.error:  # closing may wait for what is under way
        run.watcher.succeeded(push, outcome)
    run.watcher.look()
    run.made(run.writer)


def broken(run: Run) -> None:
    push = run.halted(breaks=True)
    if run.dice.random() < 0.5:
        run.others()
    run.writer.go_on(breaks=True)
    assert "cannot be read" in run.writer.ended().error
    run.watcher.failed(push)
    run.watcher.look()
    run.made(run.writer, step=push.step if run.dice.random() < 0.5 else None)


def idle(run: Run) -> None:
    run.made(run.writer)
    for _ in range(run.dice.randrange(1, 3)):
        run.others()
    run.made(run.writer)


FAULTS: tuple[Callable[[Run], None], ...] = (
    nothing_happens,
    stopped,
    closed,
    closed_and_ended,
    killed,
    forked_and_ended,
    broken,
    forked_and_killed,
    idle,
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    source = tiny_folder(tmp_path / "source", hidden_size=HIDDEN_SIZE)
    settings = {"memory_budget": MEMORY, "spill_budget": 0, "image_wait": 10.0, "grace_seconds": 5.0}
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock"), **settings) as running:
        with TrainerClient(running.address) as trainer:
            for model in MODELS:
                trainer.register_files(model, source.files)
                trainer.set_retention(model, Retention(keep_last=KEPT))
        yield running


@pytest.mark.timeout(60 + 10 * RUNS)
def test_every_visible_version_is_one_whole_push_and_stays_so_whatever_happens_to_a_writer(
    service: RunningService,
) -> None:
    watcher = Watcher(service.address)
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        dice, fault = random.Random(seed), FAULTS[seed % len(FAULTS)]
        try:
            with Run(watcher, service.address, dice) as run:
                for _ in range(dice.randrange(3)):
                    run.made(dice.choice([run.writer, run.honest]), dice.choice(MODELS))
                fault(run)
                watcher.look()
            for model in MODELS:
                watcher.abort(model)
            with TrainerClient(service.address, lane="local") as trainer:
                watcher.made(trainer, dice.choice(MODELS))
            watcher.look()
            for model in MODELS:
                watcher.admin.collect(model)
        except BaseException as error:
            error.add_note(f"{fault.__name__}; WEIGHBRIDGE_SEED={seed}")
            raise
    watcher.close()
