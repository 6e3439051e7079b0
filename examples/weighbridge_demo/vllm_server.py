"""vLLM server on a CPU machine: started, asked, and ended for certain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weighbridge.errors import Unavailable

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine, past any proxy that the environment names."""
START_SECONDS = 420.0
"""Three processes import vLLM one after the other."""
_STOP_SECONDS = 20.0
_ASK_SECONDS = 120.0
_CACHE_BYTES = 256 << 20
"""Bytes of the KV cache in each rank. By default vLLM would take a large part of the machine's memory."""
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM would give each rank a NUMA node of its own, and refuse where there are fewer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


EAGER = ("--enforce-eager",)
"""Arguments that let it compute as it is written: it need not compile what is asked a few times."""
TRACED = ("--compilation-config", '{"mode": 3, "backend": "eager"}')
"""The same, for pipeline stages: on a CPU they do not work with `EAGER`, as the buffers between them are made when it
warms up.
"""


@dataclass(frozen=True)
class Answer:
    """Greedy completion of a prompt.

    Attributes:
        text: the new tokens as text.
        logprobs: log-probability of each new token.
    """

    text: str
    logprobs: list[float]


class VllmServer:
    """A vLLM server that takes updates from the service, started as from the command line; a context that ends it.

    Args:
        python: Python of the environment that vLLM is installed in.
        server: the service's gRPC address; None for a server that starts from a folder and is connected to the service
            later.
        model: ``namespace/name``, or the folder.
        log: file for the server's output.
        arguments: more arguments for vLLM, such as its parallelism.
        extra: more keys of the load format's extra config.
        environment: more variables for its processes.
        module: Python module that runs the server.

    Attributes:
        url: URL of the server.
        pid: process ID of its first process.
    """

    def __init__(
        self,
        python: Path,
        server: str | None,
        model: str,
        log: Path,
        *arguments: str,
        extra: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        module: str = "vllm.entrypoints.openai.api_server",
    ) -> None:
        self.model = model
        self.log = log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        if server is None:
            weights = ["--weight-transfer-config", '{"backend": "weighbridge"}']
        else:
            said = json.dumps({"server": server, "version": "latest", **(extra or {})})
            weights = ["--load-format", "weighbridge", "--model-loader-extra-config", said]
        # what the command `vllm serve` runs: in builds of vLLM that have another name, the command itself does not
        # start
        command = [
            str(python.absolute()), "-m", module, "--model", model, "--host", "127.0.0.1",
            "--port", str(port), *weights, "--dtype", "float32", "--max-model-len", "256",
            "--kv-cache-memory-bytes", str(_CACHE_BYTES), *arguments,
        ]  # fmt: skip
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                cwd=log.parent,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Return when it answers.

        Args:
            seconds: how long to wait.

        Raises:
            Unavailable: it ended, or does not answer in time; has the end of its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise Unavailable(f"vLLM ended with exit code {self._process.returncode}", details=self.log_end())
            with contextlib.suppress(OSError), _DIRECT.open(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise Unavailable(f"vLLM did not start within {seconds:g} s", details=self.log_end())

    def log_end(self) -> Sequence[str]:
        """The last lines of its log."""
        return self.log.read_text(errors="replace").splitlines()[-30:]

    def complete(self, prompt: str, tokens: int) -> Answer:
        """Complete a prompt greedily."""
        asked = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
            "skip_special_tokens": False,
        }  # fmt: skip
        [choice] = self._ask("/v1/completions", asked)["choices"]
        return Answer(choice["text"], choice["logprobs"]["token_logprobs"])

    def weight_version(self) -> str:
        """Version that the server reports that it serves."""
        return str(self._ask("/weight_info")["weight_version"])

    def is_paused(self) -> bool:
        """Whether the server is paused."""
        return bool(self._ask("/is_paused")["is_paused"])

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with _DIRECT.open(request, timeout=_ASK_SECONDS) as answer:
                return json.load(answer)
        except OSError as error:
            raise Unavailable(f"vLLM does not answer {path}: {error}", details=self.log_end()) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its workers, should any be left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
