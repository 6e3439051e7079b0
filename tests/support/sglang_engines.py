"""Real SGLang in tests, in an environment of its own.

``make test-sglang`` makes that environment and names its Python in WEIGHBRIDGE_SGLANG_PYTHON.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weighbridge.follow.sglang import SglangServer

PYTHON = os.environ.get("WEIGHBRIDGE_SGLANG_PYTHON", "")
needs_sglang = pytest.mark.skipif(not PYTHON, reason="SGLang has an environment of its own: make test-sglang")
HAS_PLUGINS = any(Path(PYTHON).parents[1].glob("lib/python*/site-packages/sglang/srt/plugins")) if PYTHON else True
"""Whether this release calls plug-ins, from which on a server starts from the service; 0.5.10 does not."""
_ANSWER = "answer "
_CPU = Path(__file__).parent / "sglang_cpu"
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(_CPU), os.environ.get("PYTHONPATH")))),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **({} if HAS_PLUGINS else {"SGLANG_EXTERNAL_MODEL_PACKAGE": "weighbridge.integrations.sglang.external"}),
}


def environment(tp: int, cache: Path) -> dict[str, str]:
    """Environment variables of an engine's processes.

    The recordings of its ranks, and files that SGLang leaves behind, go to a folder of the test.
    """
    # one set of processors a rank; else each rank needs a NUMA node
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp)}
    # SGLang's connectors remove their folders on a normal end, and not when they are killed; all tests share what torch
    # has compiled
    compiled = str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
    folders = {"WEIGHBRIDGE_CACHE": str(cache), "TMPDIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": compiled}
    return {**os.environ, **_ENVIRONMENT, **threads, **folders}


def update(driver: SglangServer, version: int) -> float:
    """Take a server to a version, as an agent does; returns the seconds for which it was paused."""
    driver.prepare(version)
    started = time.monotonic()
    driver.pause()
    try:
        driver.apply(version, f"{driver.model}@{version}")
    finally:
        driver.resume()
    return time.monotonic() - started


def quiet_port() -> int:
    """A free port that no outgoing connection gets: SGLang takes long to begin to listen."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """The ranks of one SGLang engine, without a server; each is a process, joined by gloo."""

    def __init__(self, tp: int, ep: int, logs: Path) -> None:
        self.tp = tp
        self._logs = logs
        port = quiet_port()
        self._processes = [self._start(rank, ep, port) for rank in range(tp)]

    def _start(self, rank: int, ep: int, port: int) -> subprocess.Popen[str]:
        with (self._logs / f"rank{rank}.log").open("w") as log:
            return subprocess.Popen(
                [PYTHON, str(_CPU / "ranks.py"), *map(str, (rank, self.tp, ep, port))],
                env=environment(self.tp, self._logs),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def tell(self, *command: object) -> list[dict[str, Any]]:
        """Send all ranks the same command; returns each rank's answer. No rank may refuse."""
        answers = self._answers(*command)
        for answer in answers:
            assert "refused" not in answer, answer
        return answers

    def refusals(self, *command: object) -> list[str]:
        """Tell all ranks the same, which all must refuse; why each does."""
        return [answer["refused"] for answer in self._answers(*command)]

    def _answers(self, *command: object) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(_ANSWER)), "")
            assert line, (self._logs / f"rank{rank}.log").read_text()[-4000:]
            answers.append(json.loads(line.removeprefix(_ANSWER)))
            assert "failed" not in answers[-1], answers[-1]  # the others may wait for it for ever
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def ranks(tp: int, ep: int, logs: Path) -> Iterator[Ranks]:
    """Ranks that are ended in the end."""
    with ExitStack() as stack:
        started = Ranks(tp, ep, logs)
        stack.callback(started.stop)
        yield started
