"""N client processes: started, set off together and asked for their figures."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.client_process import ClientSpec
from benchmarks.memory import memory_of

_LIMIT_SECONDS = 900.0
"""Clients that have not answered by then are ended."""
_HEAD_START_SECONDS = 0.05
"""Seconds until the clocks start, so that all clients have the command by then."""


class ClientError(RuntimeError):
    """A client could not do what it was asked for, or has died."""


class Clients:
    """Clients that are running, in the order of ranks.

    Args:
        running: their processes.

    Attributes:
        pids: their processes' ids.
        nbytes: bytes that each holds.
        starts: memory of each before it did anything, in bytes, as `memory_of` counts it.
    """

    def __init__(self, running: Sequence[subprocess.Popen[str]]) -> None:
        self._running = running
        self.pids = [process.pid for process in running]
        self.nbytes = [int(answer["bytes"]) for answer in self._answers()]
        self.starts = [memory_of(pid).proportional for pid in self.pids]

    @property
    def processor_seconds(self) -> float:
        """Seconds that all of them have computed so far."""
        return sum(map(processes.processor_seconds, self.pids))

    def start(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let all clients run a command that begins at one moment; returns their answers."""
        return self.ask(do, at=time.monotonic() + _HEAD_START_SECONDS, **arguments)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let all clients do something; their answers.

        Raises:
            ClientError: one of them failed, or did not answer in time. All are ended then.
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        limit = threading.Timer(_LIMIT_SECONDS, self._kill)
        limit.start()
        try:
            answers = []
            for rank, process in enumerate(self._running):
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise ClientError(f"client {rank} has died, or did not answer in {_LIMIT_SECONDS:g} s")
                answers.append(json.loads(line))
                if "error" in answers[-1]:
                    raise ClientError(f"client {rank}: {answers[-1]['error']}")
        except ClientError:
            self._kill()
            raise
        finally:
            limit.cancel()
        return answers

    def _kill(self) -> None:
        for process in self._running:
            process.kill()


@contextmanager
def clients(
    spec: ClientSpec,
    servers: Sequence[str] = (),
    lanes: Sequence[str] = (),
    checkout: Path | None = None,
) -> Iterator[Clients]:
    """As many clients as the spec says, one for each rank; they are ended when the context is left.

    Each may use its share of the cores, as ranks on one host are set up.

    Args:
        spec: specification of all clients.
        servers: for each rank, the service that it uses; by default that of the spec.
        lanes: for each rank, the lane that it takes; by default that of the spec.
        checkout: checkout whose code the clients run; by default that of this process.
    """
    threads = str(max(len(os.sched_getaffinity(0)) // spec.clients, 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    with ExitStack() as stack:
        running = []
        for rank in range(spec.clients):
            server = servers[rank] if servers else spec.server
            lane = lanes[rank] if lanes else spec.lane
            text = json.dumps(asdict(replace(spec, rank=rank, server=server, lane=lane)))
            process = processes.python(
                "-m", "benchmarks.client_process", text, environment=environment, checkout=checkout
            )
            running.append(stack.enter_context(process))
        yield Clients(running)
