"""Jobs of verl in an environment of its own, which `make test-frameworks` makes; tests that need it run there, or say why not.

``make test-frameworks`` names its Python in WEIGHBRIDGE_VERL_PYTHON, and the folder of verl's sources, with its test helpers, in
WEIGHBRIDGE_VERL_SOURCE.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "frameworks" / "verl_cpu"
PYTHON = Path(os.environ.get("WEIGHBRIDGE_VERL_PYTHON") or "/nowhere")
SOURCE = Path(os.environ.get("WEIGHBRIDGE_VERL_SOURCE") or "/nowhere")

needs_verl = pytest.mark.skipif(
    not (PYTHON.exists() and SOURCE.exists()),
    reason="verl has an environment of its own: make test-frameworks",
)


class JobFailed(Exception):
    """What was asked of a job has raised."""


class VerlJob:
    """A running job of a framework, such as `tests/frameworks/verl_cpu/verl_job.py`."""

    def __init__(self, link: Connection[Any, Any], log: Path) -> None:
        self._link = link
        self._log = log

    def begin(self, name: str, /, **arguments: Any) -> None:
        """Ask for something; `answer` waits for it."""
        self._link.send((name, arguments))

    def answer(self, seconds: float = 240) -> Any:
        """What the job answers to what was asked last.

        Raises:
            JobFailed: it has raised; has its words.
        """
        if not self._link.poll(seconds):
            raise TimeoutError(
                f"{self._log.stem} did not answer within {seconds:g} s:\n{self._log.read_text()[-4000:]}"
            )
        try:
            done, value = self._link.recv()
        except EOFError:
            raise AssertionError(f"{self._log.stem} has ended:\n{self._log.read_text()[-4000:]}") from None
        if not done:
            raise JobFailed(value)
        return value

    def outcome(self, seconds: float = 240) -> Any:
        """As `answer`; what the job has raised is given, too."""
        try:
            return self.answer(seconds)
        except JobFailed as failed:
            return failed

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """What a method of the job gives."""
        self.begin(name, **arguments)
        return self.answer()


@contextmanager
def verl_job(folder: Path) -> Iterator[VerlJob]:
    """A job that has not been asked anything yet; ended in the end."""
    log = folder / "verl.log"
    mine, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="wb", dir="/tmp") as short, log.open("wb") as out:
        process = subprocess.Popen(
            [PYTHON, HERE / "verl_job.py", str(theirs.fileno())],
            cwd=SOURCE,  # Ray puts it before all else where its workers look for modules
            env=_environment(short),  # whose sockets want short paths
            pass_fds=[theirs.fileno()],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        try:
            with mine:
                yield VerlJob(mine, log)
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _environment(folder: str) -> dict[str, str]:
    mine = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RAY_", "VERL_"))
    }
    return mine | {
        "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, HERE))),
        "VERL_PLATFORM": "test_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # what is freed goes back at once: peaks of memory are measured
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
