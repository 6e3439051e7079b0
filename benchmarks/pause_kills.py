"""``python -m benchmarks.pause_kills``: does a real vLLM on a card serve one version or none, whatever is killed in an
update, and then the newest?

A trainer, a service, ``vllm serve`` and ``weighbridge follow`` are processes of this machine. Each is killed in a phase
of an update, the others go on; all parameters of the engine are compared with the trainer's by checksums, once right
after it, and once when what was killed is back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes
from benchmarks.pause import Peer, trainer_of
from benchmarks.pause_models import CONFIGS, MODEL, write_model
from tests.support.ports import reserved_ports
from weighbridge import EngineClient
from weighbridge.errors import WeighbridgeError

AGENT, SERVICE, TRAINER, WORKER = "agent", "service", "trainer", "worker"
STAGE, READY, APPLY = "stage", "ready", "apply"
"""Phases: a part of a version is staged, or its bytes are here, whichever is first; it is ready; its parameters are
filled, and nothing is agreed yet.
"""
KILLS = (
    (AGENT, STAGE),
    (TRAINER, STAGE),
    (SERVICE, STAGE),
    (SERVICE, READY),
    (WORKER, STAGE),
    (WORKER, APPLY),
)
"""A process to kill, and the phase of the engine."""
_START_SECONDS, _SECONDS, _LOOK_SECONDS = 400.0, 150.0, 0.02
_ROOT = Path(__file__).parent.parent
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Hung(RuntimeError):
    """Something did not come to pass in time."""


def eventually(what: str, condition: Callable[[], Any], seconds: float = _SECONDS) -> float:
    """Wait for a condition; returns the seconds that it took. Raises Hung on a timeout."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise Hung(f"{what}: not within {seconds:g} s")
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - begun


class Stage:
    """The processes, and how each is started and killed.

    Args:
        arguments: arguments of the command line.
        folder: folder for all that they write.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._logs = arguments.logs or folder
        self._stacks: dict[str, ExitStack] = {}
        self._pids: dict[str, int] = {}
        self._port, http = reserved_ports(2)
        self.address, self.url = f"127.0.0.1:{self._port}", f"http://127.0.0.1:{http}"
        self._engine_port = http
        self._hf, self._bytes = write_model(folder, arguments.model)
        self.step = 0
        self._sums: dict[int, dict[str, int]] = {}
        self._client: EngineClient | None = None
        self.trainer: Peer | None = None

    def start(self, name: str) -> None:
        """Start a process, and wait until it can be used."""
        self._stacks[name] = stack = ExitStack()
        getattr(self, f"_start_{name}")(stack)

    def kill(self, name: str) -> None:
        """End it as ``kill -9`` does, and wait until its context has ended."""
        os.kill(self._pids[name], signal.SIGKILL)
        if name == WORKER:
            # a vLLM 0.24 that was asked for something meanwhile does not end: who watches over it ends it
            eventually("the server takes no requests", lambda: not self._engine_answers(ends=True))
        self._stacks.pop(name).close()

    def close(self) -> None:
        """End all."""
        for stack in [*self._stacks.values()]:
            stack.close()
        self._stacks.clear()

    def _start_service(self, stack: ExitStack) -> None:
        log = stack.enter_context((self._logs / "service.log").open("a"))
        started = processes.service(
            self._folder, self._bytes, "--grpc", self.address, "--collect-every", "5", stderr=log.fileno()
        )
        self._pids[SERVICE] = stack.enter_context(started).pid
        self._client = self._client or EngineClient(self.address)

    def _start_trainer(self, stack: ExitStack) -> None:
        log = self._logs / "trainer.log"
        started = trainer_of(self.address, self._hf, self._arguments.device, log)
        self.trainer = stack.enter_context(started)
        self.trainer.ask("")
        self._pids[TRAINER] = self.trainer.pid

    def _start_worker(self, stack: ExitStack) -> None:
        extra = {"server": self.address, "version": "latest", **json.loads(self._arguments.extra)}
        command = [
            *(self._arguments.python, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL),
            *("--host", "127.0.0.1", "--port", str(self._engine_port), "--load-format", "weighbridge"),
            *("--model-loader-extra-config", json.dumps(extra), "--skip-tokenizer-init"),
            *("--worker-extension-cls", "benchmarks.pause_worker.Checked", "--max-model-len", "512"),
            *("--dtype", "bfloat16", "--enforce-eager", *self._arguments.serve),
        ]
        self._engine = self._run(stack, command, "engine.log", VLLM_SERVER_DEV_MODE="1")
        eventually("vLLM answers", self._engine_answers, _START_SECONDS)
        self._pids[WORKER] = self.facts()["pid"]

    def _start_agent(self, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "weighbridge", "follow", MODEL, "--ref", "live", "--url", self.url]
        log = self._logs / "agent.log"
        before = log.stat().st_size if log.exists() else 0
        agent = self._run(stack, [*command, "--server", self.address, "--json"], "agent.log")
        self._pids[AGENT] = agent.pid
        eventually("the agent says what the engine has", lambda: log.stat().st_size > before)

    def _run(self, stack: ExitStack, command: list[str], log: str, **environment: str) -> subprocess.Popen[bytes]:
        out = stack.enter_context((self._logs / log).open("a"))
        path = os.pathsep.join(str(_ROOT / each) for each in ("", "clients", "storage", "service"))
        known = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        known |= {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
        made = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=known, start_new_session=True
        )
        stack.callback(processes.kill_group, made)
        return made

    def _engine_answers(self, *, ends: bool = False) -> bool:
        if self._engine.poll() is not None and not ends:
            raise Hung(f"vLLM has ended: {(self._logs / 'engine.log').read_text()[-3000:]}")
        with contextlib.suppress(OSError), _DIRECT.open(f"{self.url}/health", timeout=5):
            return True
        return False

    def ask(self, method: str, *arguments: str) -> dict[str, Any]:
        """Answer of the engine's one worker."""
        data = json.dumps({"method": method, "args": arguments}).encode()
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/collective_rpc", data, {"Content-Type": "application/json"}
        )
        with _DIRECT.open(request, timeout=_SECONDS) as answer:
            (found,) = json.load(answer)["results"]
        return dict(found) if isinstance(found, Mapping) else {"": found}

    def facts(self) -> dict[str, Any]:
        """Answer of the worker about itself and its parameters."""
        found = self.ask("bench_facts")
        return {**found, "sums": self._compared(found["sums"])}

    def push(self, *, waits: bool = True) -> None:
        """Push the next step; ``waits`` until it is ready."""
        assert self.trainer is not None
        self.step += 1
        if waits:
            pushed = self.trainer.ask(f"push {self.step}")
            if "failed" in pushed:
                raise Hung(f"a push failed: {pushed['failed']}")
        else:
            self.trainer.tell(f"hurry {self.step}")

    def newest(self) -> Any:
        """The version that the agent follows."""
        assert self._client is not None
        return self._client.version(MODEL, "live")

    def served(self) -> str:
        """Label of the version that the worker reports as served; empty if it reports none."""
        return str(self.ask("weighbridge_status")["served"])

    def sums(self, step: int) -> dict[str, int]:
        """Checksums of the parameters of a step."""
        if step not in self._sums:
            assert self.trainer is not None
            self.trainer.ask(f"make {step}")
            self._sums[step] = self._compared(self.trainer.ask("checksums"))
        return self._sums[step]

    def _compared(self, sums: Mapping[str, int]) -> dict[str, int]:
        without = self._arguments.without
        return {name: each for name, each in sums.items() if not without or without not in name}

    def step_of(self, sums: Mapping[str, int]) -> int:
        """Step whose parameters these are, all of them; 0 if there is none."""
        steps = range(self.step, 0, -1)
        return next((step for step in steps if self.sums(step) == sums), 0)


def round_of(stage: Stage, killed: str, phase: str, folder: Path) -> dict[str, Any]:
    """Kill a process in a phase of an update; returns the engine's state after it, and when all processes are back."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stage.ask("bench_hold", phase, str(folder))
    stage.push(waits=False)
    eventually(f"the engine comes to {phase}", (folder / "held").exists)
    stage.kill(killed)
    (folder / "go").touch()
    if killed == SERVICE:
        stage.start(SERVICE)
    said: dict[str, Any] = {"killed": killed, "in": phase}
    after = None
    if killed != WORKER:
        begun = time.monotonic()
        facts, served = (
            stage.facts(),
            stage.served(),
        )  # in the engine's own order: it answers when it has done what it does
        if served != stage.served():  # the update ended in between
            facts, served = stage.facts(), stage.served()
        after = facts["sums"], served
        said["answered"] = time.monotonic() - begun
    if killed in (
        TRAINER,
        SERVICE,
    ):  # a trainer whose service has gone waits for its version: another one takes its place
        if killed == SERVICE:
            stage.kill(TRAINER)
        stage.start(TRAINER)
    elif killed in (WORKER, AGENT):
        assert stage.trainer is not None
        said["pushed"] = stage.trainer.ask("")
        stage.start(killed)
    if after is not None:
        said |= {"after": after[1], "step": stage.step_of(after[0])}
    begun = time.monotonic()
    stage.push()
    wanted = stage.newest()
    eventually(f"the engine takes {wanted}", lambda: stage.served() == f"{MODEL}@{wanted.number}")
    said["back"] = time.monotonic() - begun
    sums, expected = stage.facts()["sums"], stage.sums(wanted.step)
    wrong = sorted(name for name in sums.keys() | expected.keys() if sums.get(name) != expected.get(name))
    said |= {"newest": wanted.number, "compared": len(sums), "wrong": wrong[:5]}
    said["good"] = not wrong and (after is None or not after[1] or bool(said["step"]))
    return said


def rounds(stage: Stage, folder: Path, chosen: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Some of `KILLS`, one after the other."""
    for name in (SERVICE, TRAINER):
        stage.start(name)
    stage.push()
    assert stage.trainer is not None
    stage.trainer.ask("durable")
    stage.start(WORKER)
    stage.start(AGENT)
    for killed, phase in chosen:
        try:
            yield round_of(stage, killed, phase, folder / "holds")
        except (Hung, OSError, WeighbridgeError, RuntimeError) as error:
            yield {"killed": killed, "in": phase, "good": False, "failed": f"{type(error).__name__}: {error}"}
            return


def main() -> None:
    """Kill, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=CONFIGS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--extra", default='{"card_share": 1.0}', help="of the load format, as JSON")
    parser.add_argument(
        "--without", help="in names of parameters that are not compared: proj on a CPU, which packs them"
    )
    everything = sorted({killed for killed, _ in KILLS})
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="what is killed")
    parser.add_argument("--logs", type=Path, help="keep what the processes write in this folder")
    parser.add_argument("serve", nargs="*", help="more arguments of vllm serve, after --")
    arguments = parser.parse_args()
    processes.end_tidily()
    chosen = [each for each in KILLS if each[0] in arguments.only]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(arguments, Path(folder))
        try:
            for each in rounds(stage, Path(folder), chosen):
                found.append(each)
                print(json.dumps(each), flush=True)
        finally:
            stage.close()
    good = sum(each["good"] for each in found)
    print(f"kills: {good} of {len(chosen)} end with one version or none, and then with the newest, exact")
    if good < len(chosen):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
