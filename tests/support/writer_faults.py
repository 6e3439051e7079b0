"""Processes that push by the local lane, and stop where a test says, in the middle of their copy."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.forked import forking
from tests.support.raw_clients import Arrays, tiny_shapes, whole_layout
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Layout
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.strided import WrittenCounts
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import DataLoss
from weighbridge_demo import ranks

DEVICE = os.environ.get("WEIGHBRIDGE_WRITER_FAULTS_DEVICE", "cpu")
"""Device of the tensors, ``cpu`` or ``cuda``. Copies from a GPU can be in progress while no thread waits for them."""
HIDDEN_SIZE = 256
FIRST_TOKEN = 1 << 9
"""Smaller ones would make numbers that are not normal."""
_POSITION_BITS = 14
_PUSH_SECONDS = 30.0
_BUSY_CYCLES = 2_000_000_000
"""Cycles of a GPU: it computes for about a second, and copies wait for that."""
_CLOSE_SECONDS = 0.1
"""Seconds that a writer waits for its client to close before it goes on: closing may wait for the copy."""


@functools.lru_cache(64)
def pattern(token: int) -> dict[str, np.ndarray]:
    """The tensors of one push: every number tells whose it is, and nearly where it belongs."""
    arrays, start = {}, 0
    for name, shape in tiny_shapes(HIDDEN_SIZE).items():
        size = int(np.prod(shape))
        positions = np.arange(start, start + size, dtype=np.uint32) % (1 << _POSITION_BITS)
        arrays[name] = (positions | np.uint32(token << _POSITION_BITS)).view(np.float32).reshape(shape)
        start += size + 1
    return arrays


def token_of(array: np.ndarray) -> int:
    """Token of the push that wrote the first number of an array."""
    return int(array.reshape(-1)[:1].view(np.uint32)[0]) >> _POSITION_BITS


def tokens_in(array: np.ndarray) -> set[int]:
    """Tokens of all pushes that wrote numbers of an array."""
    return {int(each) for each in np.unique(np.ascontiguousarray(array).view(np.uint32) >> _POSITION_BITS)}


@dataclass(frozen=True)
class Push:
    """One push.

    Attributes:
        model: model of the push.
        step: the training step. Pushes of one step are attempts at the same version.
        token: token of its tensors; see `pattern`.
        halts_at: the part of its shards after which it halts; None if it does not.
        under_way: whether it only says that it halts, while a GPU has yet to copy all of it, and goes on by itself.
    """

    model: str
    step: int
    token: int
    halts_at: float | None = None
    under_way: bool = False


class Outcome(NamedTuple):
    """Outcome of a push, as its client received it.

    Attributes:
        number: number of the version; 0 if the push failed.
        lane: lane of its bytes.
        error: error of a failed push.
    """

    number: int
    lane: str = ""
    error: str = ""


class HaltingSource(TensorSource):
    """Tensors of which some are written before ``halt`` is called, and the others after that."""

    def __init__(self, stream: Layout, tensors: Sequence[torch.Tensor], first: int, halt: Callable[[], None]) -> None:
        super().__init__(StagingPool(), stream, tensors)
        self._first = first
        self._halt = halt

    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts:
        none: list[Sequence[ByteCopy[int]]] = [()] * len(copies)
        before = super().write([*copies[: self._first], *none[self._first :]], memories, on_written)
        self._halt()
        after = super().write([*none[: self._first], *copies[self._first :]], memories, on_written)
        counts = [a + b for a, b in zip(before.counts, after.counts, strict=True)]
        return WrittenCounts(counts, [*before.uncounted, *after.uncounted])


class BusySource(TensorSource):
    """Tensors on a GPU that has something else to do before it copies them; ``halt`` is called meanwhile."""

    def __init__(self, stream: Layout, tensors: Sequence[torch.Tensor], halt: Callable[[], None]) -> None:
        super().__init__(StagingPool(), stream, tensors)
        self._halt = halt

    def write(self, copies: Sequence[Sequence[ByteCopy[int]]], memories: Sequence[MappedMemory]) -> WrittenCounts:
        torch.cuda._sleep(_BUSY_CYCLES)
        threading.Timer(_CLOSE_SECONDS, self._halt).start()
        return super().write(copies, memories)


def push_pattern(client: TrainerClient, push: Push, halt: Callable[[], None] = lambda: None) -> Outcome:
    """Make a push; says what became of it once it has been sealed or has failed."""
    arrays: Arrays = pattern(push.token)
    layout = whole_layout(arrays)
    tensors = [torch.from_numpy(arrays[placement.shard.tensor]).to(DEVICE) for placement in layout.placements]
    first = len(tensors) if push.halts_at is None else round(push.halts_at * len(tensors))
    shards: TensorSource
    shards = BusySource(layout, tensors, halt) if push.under_way else HaltingSource(layout, tensors, first, halt)
    try:
        handle = client.push_shards(
            push.model, layout, TensorSpace.HUGGING_FACE, shards, step=push.step, rank=0, world_size=1
        )
        report = handle.report(_PUSH_SECONDS)
    except Exception as error:  # a client that was closed meanwhile raises what it comes across
        return Outcome(0, error=repr(error))
    return Outcome(handle.number, report.lane)


class _Writer:
    """The other side of a `WriterProcess`: its methods are what may be asked of it."""

    def __init__(self, address: str, orders: Connection) -> None:
        self._address = address
        self._orders = orders
        self._saying = threading.Lock()
        self._client = TrainerClient(address, lane="local", retry_seconds=5.0)
        self._resumed = threading.Event()
        self._breaks = False

    def push(self, push: Push) -> None:
        self._resumed.clear()
        threading.Thread(target=self._push, args=(self._client, push), daemon=True).start()

    def go_on(self, breaks: bool) -> None:
        self._breaks = breaks
        self._resumed.set()

    def close(self) -> None:
        closing = threading.Thread(target=self._client.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        self._client = TrainerClient(self._address, lane="local", retry_seconds=5.0)
        self._say("closed")

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        self._say("forked", child)

    def _push(self, client: TrainerClient, push: Push) -> None:
        def halt() -> None:
            if push.halts_at is None:
                return
            self._say("halted")
            if push.under_way:
                return
            self._resumed.wait()
            if self._breaks:
                raise DataLoss("the tensors cannot be read")

        self._say("ended", push_pattern(client, push, halt))

    def _say(self, what: str, value: object = None) -> None:
        with self._saying:
            self._orders.send((what, value))


def _follow(address: str, orders: Connection) -> None:
    """Carry out orders until the other end of the pipe is closed."""
    writer = _Writer(address, orders)
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = orders.recv()
            getattr(writer, what)(*arguments)
    os._exit(0)  # whatever is under way


def _forking_without_cuda() -> ForkServerContext:
    """As `forking`, without what calls CUDA when it is imported, as Megatron does: a process that is forked after that
    cannot.
    """
    ranks.start_server(("torch", "weighbridge._trainers.trainer"))
    return multiprocessing.get_context("forkserver")


class Child:
    """A process forked from a writer, which holds all that it inherited and touches nothing."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def end(self) -> None:
        """Kill it; returns once the kernel has released its resources."""
        if self._descriptor >= 0:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            assert select.select([self._descriptor], [], [], 20)[0]
            os.close(self._descriptor)
            self._descriptor = -1


class WriterProcess:
    """A process with a client of the local lane.

    Args:
        address: address of the service.
    """

    def __init__(self, address: str) -> None:
        processes = forking() if DEVICE == "cpu" else _forking_without_cuda()
        self._orders, theirs = processes.Pipe()
        self._process = processes.Process(target=_follow, args=(address, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, push: Push) -> None:
        """Let it push. If the push halts, returns when it has."""
        self._orders.send(("push", push))
        if push.halts_at is not None:
            self._hear("halted")

    def ended(self) -> Outcome:
        """Wait for the push to end, and return its outcome."""
        outcome: Outcome = self._hear("ended")
        return outcome

    def go_on(self, *, breaks: bool = False) -> None:
        """Let a push that has halted go on; with ``breaks``, its tensors cannot be read from here on."""
        self._orders.send(("go_on", breaks))

    def close_client(self) -> None:
        """Let another thread than the one that pushes close the client. The next push is made by a new one."""
        self._orders.send(("close",))
        self._hear("closed")

    def fork(self) -> Child:
        """Let it fork."""
        self._orders.send(("fork",))
        return Child(self._hear("forked"))

    def stop(self) -> None:
        """Let none of its threads run until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._process.kill()
        self._process.join()
        self._orders.close()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _hear(self, what: str) -> Any:
        assert self._orders.poll(2 * _PUSH_SECONDS), f"the writer has not {what}"
        said, value = self._orders.recv()
        assert said == what, f"the writer has {said} ({value}), not {what}"
        return value
