"""Processes of a measurement, the service among them: started, and ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MEMORY_RESERVE = 3 << 30
_STOP_SECONDS = 60.0
_PACKAGES = ("", "clients", "storage", "service")
"""Folders of a checkout in which its packages are."""


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        grpc: its gRPC address.
        http: its HTTP URL.
        pid: its process.
    """

    grpc: str
    http: str
    pid: int


def end_tidily() -> None:
    """Let SIGTERM end this process as Ctrl-C does: it prints the signal, ends its child processes, and removes its
    files.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        print(f"ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and the group, as ``kill -9`` does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    checkout: Path | None = None,
    stderr: int = 2,
) -> Iterator[subprocess.Popen[str]]:
    """A Python process with its standard input and output as pipes; is ended when the context is left.

    Args:
        arguments: arguments of the interpreter.
        environment: environment variables of the process; by default, that of this one.
        checkout: checkout whose code it runs; by default, the same as this process.
        stderr: a descriptor for its standard error; by default, this process's own.
    """
    command = [sys.executable, "-W", "ignore", *arguments]
    if checkout is not None:
        path = os.pathsep.join(str(checkout / folder) for folder in _PACKAGES)
        environment = {**(os.environ if environment is None else environment), "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        cwd=checkout,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def processor_seconds(pid: int) -> float:
    """Seconds that a process has computed so far, on all its threads."""
    # the clock that clock_getcpuclockid(3) makes of a process
    return time.clock_gettime(~pid << 3 | 2)


def first_line(process: subprocess.Popen[str]) -> str:
    """First line of a process's standard output.

    Raises:
        RuntimeError: the process ended instead.
    """
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args!r} did not start")
    return line


@contextmanager
def service(
    folder: Path,
    model_bytes: int,
    *options: str,
    program: Sequence[str] = ("-m", "weighbridge"),
    checkout: Path | None = None,
    stderr: int = 2,
) -> Iterator[Service]:
    """A service over a store in a folder, a new one if there is none.

    Its memory is enough for one image of the model, and for two if the machine has it: the version that engines pull
    and the one that is being pushed. Else every other version is put together in a file.

    Args:
        folder: the store is its folder ``store``.
        model_bytes: bytes of the part of the model that the service puts together.
        options: options of the command line, besides those that all services get.
        program: arguments of Python that name the program.
        checkout: checkout whose code it runs; by default, the same as this process.
        stderr: a descriptor for its standard error; by default, this process's own.
    """
    available = _available_memory() - MEMORY_RESERVE - model_bytes * 5 // 4
    budget = max(model_bytes * 11 // 10, min(model_bytes * 22 // 10, available))
    arguments = (
        *(*program, "serve", "--store", str(folder / "store")),
        *("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error"),
        *("--memory-budget", str(budget), "--grace", "1", "--collect-every", "0"),
        *options,
    )
    with python(*arguments, checkout=checkout, stderr=stderr) as process:
        line = first_line(process)
        grpc, http = (line.split(f"{face} on ")[1].split(",")[0] for face in ("gRPC", "HTTP"))
        yield Service(grpc, http, process.pid)


@contextmanager
def raw_grpc_server(checkout: Path | None = None) -> Iterator[str]:
    """The address of a server of `benchmarks.raw_grpc`."""
    with python("-m", "benchmarks.raw_grpc", checkout=checkout) as process:
        yield first_line(process)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken so far, without its children."""
    # the name, in parentheses, may have spaces in it
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def run(*command: str) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; has what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
