"""Engine of two ranks, its agent and its trainer, each a process that stops at phases of an update, says so, and can be
killed there.

A process that comes to a phase sends its name by its pipe and waits for an answer; `Cast` answers at once, unless a
test has asked it to hold that phase.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Client, Connection, Listener, Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.example_engine import Llama, LlamaEngine, start
from tests.support.forked import forking
from tests.support.raw_clients import rows_layout
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._lane import loans
from weighbridge._lazy import EarlyStaging, StagingPlace
from weighbridge._lazy.caching import CACHE_VARIABLE
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import EngineFailed, Prepared, Ranks, Serving, serving_of, wait_prepared
from weighbridge.follow.status import Status
from weighbridge.integrations.engine_rank.agreement import ProcessGroup
from weighbridge.integrations.engine_rank.preparation import Preparation
from weighbridge.integrations.engine_rank.rank import EngineRank

Look = tuple[Status, dict[str, np.ndarray], bool]
"""Status of a rank, its parameters, and whether it is paused."""
MODEL = "tests/kills"
SIZE = 2
WAIT_SECONDS = 60.0
RANKS = tuple(f"rank {number}" for number in range(SIZE))
AGENT, TRAINER = "agent", "trainer"
PUSHING = "pushing"
"""Phase of the trainer: all of a version but its last shards is written."""


def tensors_of(shapes: Mapping[str, Sequence[int]], step: int) -> dict[str, torch.Tensor]:
    """The model of a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def expected(config: Any, shapes: Mapping[str, Sequence[int]], rank: int, step: int) -> dict[str, np.ndarray]:
    """Parameters of a rank with the model of a step, by the model's own loader."""
    model = Llama(config, rank, SIZE)
    model.load_weights(tensors_of(shapes, step).items())
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


class Cast:
    """The processes, as the test sees them: started, stopped at phases, and killed.

    Args:
        folder: folder for sockets and recordings.
        address: address of the service.
        config: config of the model.
        shapes: shapes of its tensors.

    Attributes:
        said: everything that processes have said, each with the process's name.
    """

    def __init__(self, folder: Path, address: str, config: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self.said: list[tuple[str, Any]] = []
        self._folder, self._address, self._config, self._shapes = folder, address, config, shapes
        self._changed = threading.Condition()
        self._held: dict[str, str] = {}
        self._stopped: dict[str, str] = {}
        self._ends: dict[str, Connection] = {}
        self._processes: dict[str, ForkServerProcess] = {}
        self._lost: set[str] = set()
        """Processes that have ended by themselves."""
        self._starts = 0

    def start_engine(self, version: int) -> None:
        """Start all ranks with a version."""
        self._starts += 1
        group = str(self._folder / f"group{self._starts}")
        for number, name in enumerate(RANKS):
            arguments = (number, self._folder, group, self._address, self._config, version)
            self._start(name, run_rank, arguments)
        for name in RANKS:
            self.hear(name, "up")

    def start_agent(self, ref: str) -> None:
        """Start an agent that lets the engine follow a ref."""
        self._start(AGENT, run_agent, (self._folder, self._address, ref))

    def start_trainer(self) -> None:
        """Start a trainer, which pushes a step for each call of `push`."""
        self._start(TRAINER, run_trainer, (self._address, self._shapes))

    def push(self, step: int) -> None:
        """Let the trainer begin to push a step."""
        self._ends[TRAINER].send(step)

    def hold(self, name: str, phase: str) -> None:
        """Let a process wait when it comes to a phase."""
        with self._changed:
            self._held[name] = phase

    def until_held(self, name: str) -> None:
        """Wait until a process has come to the phase at which it is to wait."""
        self.wait(lambda: name in self._stopped, f"{name} does not come to its phase")

    def release(self) -> None:
        """Let all waiting processes go on, and hold none from now on."""
        with self._changed:
            stopped, self._held = {**self._stopped}, {}
            self._stopped.clear()
        for name in stopped:
            with suppress(OSError):
                self._ends[name].send("go on")

    def hear(self, name: str, what: Any, after: int = 0) -> None:
        """Wait until a process has said something."""
        self.wait(lambda: (name, what) in self.said[after:], f"{name} does not say {what}")

    def wait(self, condition: Callable[[], object], problem: str) -> None:
        """Wait for something that a process brings about by what it says."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or condition(), WAIT_SECONDS)
            assert condition(), f"{problem}; said last: {self.said[-8:]}; waiting: {self._stopped}; ended: {self._lost}"

    def kill(self, *names: str) -> None:
        """End processes as ``kill -9`` does."""
        for name in names:
            with self._changed:
                process = self._processes.pop(name, None)
            if process is not None:
                process.kill()
                process.join(WAIT_SECONDS)
                process.close()
            with self._changed:
                self._stopped.pop(name, None)
                self._held.pop(name, None)

    def look(self) -> dict[int, Look]:
        """State of each rank that lives, at one time if all do. Waits for the ranks' current operations."""
        with suppress(EngineFailed):
            return dict(enumerate(ask(_socket(self._folder, 0), "all", "look")))
        found = {}
        for number in range(SIZE):
            with suppress(EngineFailed):
                found[number] = ask(_socket(self._folder, number), "look")
        return found

    def expected(self, number: int, step: int) -> dict[str, np.ndarray]:
        """Parameters of a rank with the model of a step."""
        return expected(self._config, self._shapes, number, step)

    def close(self) -> None:
        """End all processes."""
        self.kill(*list(self._processes))

    def _start(self, name: str, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        mine, theirs = Pipe()
        process = forking().Process(target=run, args=(Told(theirs), *arguments), daemon=True)
        process.start()
        theirs.close()
        with self._changed:
            self._processes[name], self._ends[name] = process, mine
        threading.Thread(target=self._listen, args=(name, mine), daemon=True).start()

    def _listen(self, name: str, end: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, what = end.recv()
                with self._changed:
                    self.said.append((name, what))
                    holds = kind == "phase" and self._ends[name] is end and self._held.get(name) == what
                    if holds:
                        self._stopped[name] = what
                    self._changed.notify_all()
                if kind == "phase" and not holds:
                    end.send("go on")
        with self._changed:
            if name in self._processes and self._ends[name] is end:
                self._lost.add(name)
                self._changed.notify_all()


class Told:
    """A process's own end of its pipe."""

    def __init__(self, end: Connection) -> None:
        self.end = end

    def begin(self) -> None:
        """End this process when the one that has started it ends."""
        torch.set_num_threads(1)
        parent = parent_process()
        assert parent is not None
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()

    def say(self, what: Any) -> None:
        """Tell the test."""
        self.end.send(("said", what))

    def at(self, phase: str) -> None:
        """Come to a phase, and wait there for as long as the test wants."""
        self.end.send(("phase", phase))
        self.end.recv()


def ask(socket: str, *request: Any) -> Any:
    """The answer of a rank. Raises EngineFailed if it does not answer."""
    try:
        with Client(socket, "AF_UNIX") as connection:
            connection.send(request)
            return connection.recv()
    except (OSError, EOFError) as error:
        raise EngineFailed(f"{socket} does not answer: {error!r}") from error


def _socket(folder: Path, number: int) -> str:
    return str(folder / f"rank{number}.sock")


class Server:
    """One rank, which does what it is asked for in its only thread, and the first rank what all are asked for."""

    def __init__(self, told: Told, rank: EngineRank, others: Sequence[str]) -> None:
        self._told, self._rank, self._others = told, rank, others
        self.paused = self.updates = False

    def serve(self, listener: Listener) -> None:
        """Answer for ever."""
        while True:
            with suppress(OSError, EOFError), listener.accept() as connection:
                connection.send(self._answer(*connection.recv()))

    def _answer(self, what: str, *arguments: Any) -> Any:
        if what != "all":
            return self._do(what, *arguments)
        asked = []
        for other in self._others:  # all of them, before this one: they wait for each other
            asked.append(Client(other, "AF_UNIX"))
            asked[-1].send(arguments)
        mine = self._do(*arguments)
        return [mine, *(each.recv() for each in asked)]

    def _do(self, what: str, *arguments: Any) -> Any:
        """As workers do: the status, and what has failed."""
        if what == "look":
            parameters = {name: p.detach().numpy().copy() for name, p in self._rank.engine.model.named_parameters()}
            return self._rank.status(), parameters, self.paused
        failed = ""
        try:
            if what in ("pause", "resume"):
                self.paused = what == "pause"
            elif what != "status":
                self.updates = what == "apply"
                getattr(self._rank, what)(*arguments)
        except Exception as error:
            failed = str(error) or repr(error)
        finally:
            self.updates = False
        return self._rank.status(), failed


def run_rank(told: Told, number: int, folder: Path, group: str, address: str, config: Any, version: int) -> None:
    """A rank of the engine, which comes to the phases ``early``, ``stage``, ``ready``, ``agree``, ``apply`` and
    ``applied``.
    """
    told.begin()
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    socket = _socket(folder, number)
    Path(socket).unlink(missing_ok=True)
    listener = Listener(socket, "AF_UNIX")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group}",
        rank=number,
        world_size=SIZE,
        timeout=timedelta(seconds=2 * WAIT_SECONDS),
    )
    rank = start(config, address, MODEL, version)
    rank.engine.place = StagingPlace(torch.zeros(4 << 20, dtype=torch.uint8))
    server = Server(told, rank, [_socket(folder, each) for each in range(SIZE) if not number and each])
    _come_to_phases(told, rank, server)
    told.say("up")
    server.serve(listener)


def _come_to_phases(told: Told, rank: EngineRank, server: Server) -> None:
    note, take, gather, fill = (
        Preparation._note,
        EarlyStaging.take,
        ProcessGroup.all_gather_object,
        rank.engine.fill,
    )
    named = {"brought": "stage", "ready": "ready"}

    def noted(self: Preparation, what: str) -> None:
        note(self, what)
        if what in named:
            told.at(named[what])

    def taken(self: EarlyStaging) -> bool:
        found = take(self)
        if found:
            told.at("early")
        return found

    def gathered(self: ProcessGroup, mine: Any) -> list[Any]:
        if server.updates:
            told.at("agree")
        return gather(self, mine)

    def filled(*arguments: Any) -> None:
        told.at("apply")
        fill(*arguments)
        told.at("applied")

    Preparation._note, EarlyStaging.take = noted, taken  # type: ignore[method-assign]
    ProcessGroup.all_gather_object = gathered  # type: ignore[assignment,method-assign]
    rank.engine.fill = filled  # type: ignore[method-assign]
    assert isinstance(rank.engine, LlamaEngine)


class Driver:
    """The engine, as its agent sees it; comes to the phases ``pause`` and ``resume``."""

    def __init__(self, told: Told, socket: str) -> None:
        self._told, self._socket = told, socket

    def connect(self) -> None:
        self._ask("connect")

    def serving(self) -> Serving:
        return serving_of(self._ask("status"), MODEL)

    def prepare(self, version: int) -> Prepared:
        return wait_prepared(self._ask("prepare", version), partial(self._ask, "status"), MODEL, version, WAIT_SECONDS)

    def prepare_early(self, version: int) -> None:
        self._ask("prepare_early", version)

    def discard(self) -> None:
        self._ask("discard")

    def pause(self) -> None:
        self._told.at("pause")
        self._ask("pause")

    def apply(self, version: int, label: str) -> None:
        self._ask("apply", version)

    def resume(self) -> None:
        self._told.at("resume")
        self._ask("resume")

    def label(self, label: str) -> None:
        """Nothing: it has no clients."""

    def _ask(self, *request: Any) -> Ranks:
        answers = ask(self._socket, "all", *request)
        problems = [f"rank {number}: {failed}" for number, (_, failed) in enumerate(answers) if failed]
        if problems:
            raise EngineFailed(f"{request[0]} failed", details=problems)
        return {f"rank {number}": status for number, (status, _) in enumerate(answers)}


def run_agent(told: Told, folder: Path, address: str, ref: str) -> None:
    """An agent, which says the version that its engine has after each update."""
    told.begin()
    client = EngineClient(address)
    follower = Follower(client, MODEL, Driver(told, _socket(folder, 0)), ref, 0.05, look_seconds=0.05)
    while True:
        try:
            for done in follower.run():
                told.say((done.version, done.serves, bool(done.error)))
        except WeighbridgeError as error:  # the engine is away: its agent is started again
            told.say(str(error))


def run_trainer(told: Told, address: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """A trainer, which comes to `PUSHING` in each push, and says the step and the version when that is ready."""
    told.begin()
    loans._REPORTED_BYTES = 1

    class Source(TensorSource):
        """Stops before its last shards."""

        def write(self, copies: Any, memories: Any, on_written: Any = None) -> Any:
            half = len(copies) // 2 + 1
            super().write([*copies[:half], *([()] * (len(copies) - half))], memories, on_written)
            told.at(PUSHING)
            return super().write([*([()] * half), *copies[half:]], memories, on_written)

    with TrainerClient(address, lane="local") as client:
        told.say("up")
        while True:
            step = told.end.recv()
            tensors = tensors_of(shapes, step)
            layout = rows_layout({name: tensor.numpy() for name, tensor in tensors.items()}, 0, 1)
            shards = Source(StagingPool(), layout, [tensors[each.shard.tensor] for each in layout.placements])
            try:
                pushed = client.push_shards(
                    MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=step, rank=0, world_size=1
                ).wait("ready", timeout=WAIT_SECONDS / 2)
                told.say((step, pushed.number))
            except WeighbridgeError as error:
                told.say((step, str(error)))
