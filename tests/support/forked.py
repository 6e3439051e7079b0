"""Processes that have imported torch, Megatron and the service when they start: ranks, services, and programs that
tests kill.

They are forked from one server a test process, which has imported what its first user asks for and nothing later: so
all ask for the same. gRPC is among it, which starts no thread before there is a channel or a server; these would not
survive a fork, and the server makes none. Imports left to the forked process would cost it seconds of a core, many
times what else it does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weighbridge_demo import ranks
from weighbridge_demo.ranks import Job

PRELOAD = (
    *ranks.PRELOAD,
    "tests.support.megatron_families",
    "tests.support.reference",
    "mbridge",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "torch._inductor.compile_fx",
    "peft",
    "pytest",
    "boto3",
    "model_signing._cli",
    "weighbridge._clients.engine",
    "weighbridge._trainers.trainer",
    "weighbridge_service.models.bridges",
    "weighbridge_service.server",
)


def forking() -> ForkServerContext:
    """Context that starts such processes; the server has been started by then, and imports."""
    ranks.start_server(PRELOAD)
    return multiprocessing.get_context("forkserver")


def run_jobs(jobs: Sequence[Job], *, timeout: float) -> list[list[Any]]:
    """As `weighbridge_demo.ranks.run_jobs`, of processes that have imported what tests need."""
    return ranks.run_jobs(jobs, timeout=timeout, preload=PRELOAD)


class ForkedPython:
    """Python running a program, as `subprocess.Popen` does with pipes and text: the same names, as far as tests use
    them.

    Args:
        arguments: Python's: ``-m MODULE`` or ``-c CODE``, and those of the program.
        stderr: a descriptor of the program's standard error.
        environment: the program's; this process's own if None.
    """

    def __init__(self, *arguments: str, stderr: int = 2, environment: Mapping[str, str] | None = None) -> None:
        self.args = arguments
        read_stdin, write_stdin = os.pipe()
        read_stdout, write_stdout = os.pipe()
        self.stdin = os.fdopen(write_stdin, "w")
        self.stdout = os.fdopen(read_stdout)
        ends = (
            Connection(read_stdin, writable=False),
            Connection(write_stdout, readable=False),
            Connection(os.dup(stderr), readable=False),
        )
        program = (arguments, {**(os.environ if environment is None else environment)}, os.getcwd(), ends)
        self._process = forking().Process(target=_run, args=program, daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; returns its exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, None]:
        """Close its standard input, and wait for its end; returns the rest of its standard output."""
        self.stdin.close()
        with self.stdout:
            said = self.stdout.read()
        self.wait(timeout)
        return said, None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.stdin.close()
        self.wait()


@contextmanager
def forked_python(
    *arguments: str,
    stderr: int = 2,
    environment: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Iterator[ForkedPython]:
    """A `ForkedPython`, killed in the end. It runs the code of this process, and that of no other checkout."""
    assert checkout is None
    with ForkedPython(*arguments, stderr=stderr, environment=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(arguments: tuple[str, ...], environment: Mapping[str, str], folder: str, ends: tuple[Connection, ...]) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 (for as long as the process lives)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # this process, unlike those that are daemons for multiprocessing, may start others
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    option, program, *sys.argv[1:] = arguments
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = option
            exec(program, {"__name__": "__main__"})
    finally:
        # as Python ends a program, and multiprocessing ends none
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
