"""Does the service start, report that it is ready, drain and stop as a supervisor requires?"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.support.forked import ForkedPython, forked_python
from tests.support.reference import tiny_config, tiny_model
from tests.support.waiting import eventually
from weighbridge import EngineClient, TensorParallel, TrainerClient
from weighbridge._clients import rank_stream
from weighbridge._core.resources import VersionState
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_service.server import HttpServer

pytestmark = pytest.mark.process

MODEL = "tests/smol"
_READY = re.compile(r"weighbridge serving gRPC on (127\.0\.0\.1:\d+), HTTP on (http://127\.0\.0\.1:\d+), store (/.*)\n")
_PROGRAM = """
import sys
from pathlib import Path
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.server import run
store, grpc, http, drain_seconds = sys.argv[1:]
config = ServiceConfig(Path(store), memory_budget=1 << 28, drain_seconds=float(drain_seconds))
sys.exit(run(config, grpc, http, "info"))
"""


class Served:
    """A service in a process of its own.

    Args:
        store: its store.
        imported: whether the process begins with everything imported, and not as a user's does.
    """

    def __init__(
        self,
        store: Path,
        *,
        grpc: str = "127.0.0.1:0",
        http: str = "127.0.0.1:0",
        drain_seconds: float = 120.0,
        imported: bool = True,
    ) -> None:
        self._log = store.parent / f"{store.name}-{time.monotonic_ns()}.log"
        program = ["-c", _PROGRAM, str(store), grpc, http, str(drain_seconds)]
        with self._log.open("w") as log:
            self.process = (
                ForkedPython(*program, stderr=log.fileno())
                if imported
                else subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, stderr=log, text=True)
            )

    def output(self) -> tuple[str, str]:
        """The rest of stdout, and all of stderr."""
        with self.process as process:
            assert process.stdout is not None
            return process.stdout.read(), self._log.read_text()

    def wait_until_ready(self) -> Served:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = _READY.fullmatch(line)
        assert found, line + self._log.read_text()
        self.grpc, self.url, self.store = found.groups()
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def health(self, service: str = "") -> int:
        with grpc.insecure_channel(self.grpc) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status
            return status


@contextmanager
def served(store: Path, **settings: Any) -> Iterator[Served]:
    service = Served(store, **settings)
    with service.process:
        try:
            yield service.wait_until_ready()
        finally:
            service.process.kill()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: PreTrainedModel = tiny_model(tiny_config("llama", tied=False), seed=2)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return folder


@contextmanager
def held_pushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop pushes before their first byte; yields the event that reports this, and the one that releases them."""
    begun, go_on = threading.Event(), threading.Event()
    messages = rank_stream._messages

    def slowly(*args: Any) -> Iterator[Any]:
        for message in messages(*args):
            yield message
            begun.set()
            go_on.wait(120)

    with monkeypatch.context() as patch:
        patch.setattr(rank_stream, "_messages", slowly)
        try:
            yield begun, go_on
        finally:
            go_on.set()


def test_a_push_under_way_survives_sigterm_and_the_next_service_has_it(
    tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with served(store) as first, held_pushes(monkeypatch) as (begun, go_on):
        assert first.store == str(store)
        assert httpx.get(f"{first.url}/livez", timeout=60).status_code == 200
        assert httpx.get(f"{first.url}/readyz", timeout=60).status_code == 200
        with TrainerClient(first.grpc, retry_seconds=0, lane="grpc") as client:
            client.register_model(MODEL, hf_folder)
            push = client.push_folder(MODEL, hf_folder, step=7)
            assert begun.wait(60)
            first.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{first.url}/readyz", timeout=60).status_code == 503)
            assert httpx.get(f"{first.url}/livez", timeout=60).status_code == 200
            assert first.health() == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(Unavailable, match="shutting down"):
                client.push_folder(MODEL, hf_folder, step=8)
            assert first.process.poll() is None
            go_on.set()
            version = push.wait(timeout=60)
        assert version.state is VersionState.DURABLE
        assert first.process.wait(60) == 0
        assert first.output()[0] == ""

    with served(store) as second:
        answer = httpx.get(f"{second.url}/v1/models/{MODEL}/versions/latest", timeout=60).json()
        assert (answer["number"], answer["step"], answer["state"]) == (version.number, 7, "durable")
        job = httpx.post(f"{second.url}/v1/exports", json={"model": MODEL}, timeout=60).json()
        with httpx.stream("GET", f"{second.url}/v1/exports/{job['id']}/events", timeout=60) as events:
            assert "event: end" in list(events.iter_lines())
        expected = load_file(hf_folder / "model.safetensors")
        found = load_file(Path(job["folder"]) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())
        assert second.stop(signal.SIGINT) == 0


def test_grpc_answers_health_and_reflection(tmp_path: Path) -> None:
    with served(tmp_path / "store") as service, grpc.insecure_channel(service.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = stub.ServerReflectionInfo(iter([request]), timeout=60)
        names = {found.name for found in answer.list_services_response.service}
        assert names == {
            "weighbridge.v1.ModelService",
            "weighbridge.v1.EngineService",
            "weighbridge.v1.ReplicaService",
            "weighbridge.v1.CheckpointService",
            "weighbridge.v1.BulkService",
            "weighbridge.v1.LocalLaneService",
            "weighbridge.v1.WeightService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for name in ("", *(name for name in names if name.startswith("weighbridge"))):
            assert service.health(name) == health_pb2.HealthCheckResponse.SERVING


def test_many_registrations_right_after_the_start(tmp_path: Path, hf_folder: Path) -> None:
    """All ranks register at once, while the service is still importing what that needs."""

    def register(_: int) -> str:
        with TrainerClient(service.grpc) as client:
            return client.register_model(MODEL, hf_folder).name

    with served(tmp_path / "store", imported=False) as service, ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(register, range(4))) == [MODEL] * 4


def test_a_service_imports_no_torch_whatever_models_it_serves(tmp_path: Path, hf_folder: Path) -> None:
    heavy = '{"torch", "transformers", "megatron", "mbridge", "boto3"}'
    program = _PROGRAM.replace("sys.exit(run(", "code = run(").replace('"info"))', '"info")')
    program += f"print(sorted({heavy} & sys.modules.keys()))\nsys.exit(code)\n"
    store = str(tmp_path / "store")
    command = [sys.executable, "-c", program, store, "127.0.0.1:0", "127.0.0.1:0", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = _READY.fullmatch(process.stdout.readline())
        assert ready
        with TrainerClient(ready[1]) as trainer, EngineClient(ready[1]) as engine:
            trainer.register_model(MODEL, hf_folder)
            number = trainer.push_folder(MODEL, hf_folder).wait(timeout=120).number
            pulled = dict(engine.pull(MODEL, number, layout=TensorParallel(2, 1)))
        weights = load_file(hf_folder / "model.safetensors")
        assert pulled.keys() == weights.keys()
        name = "model.layers.1.self_attn.q_proj.weight"
        assert pulled[name].equal(weights[name].chunk(2)[1])
        process.terminate()
        assert process.stdout.read() == "[]\n"
        assert process.wait(60) == 0


def child_of(pid: int) -> Path:
    """The folder below ``/proc`` of the one process that a process has started, or starts now."""

    def children() -> set[str]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {number for task in tasks for number in (task / "children").read_text().split()}

    eventually(children)
    (child,) = children()
    return Path("/proc") / child


def test_a_process_for_weight_maps_that_dies_is_started_again(tmp_path: Path, hf_folder: Path) -> None:
    with served(tmp_path / "store", imported=False) as service:
        first = child_of(service.process.pid)
        os.kill(int(first.name), signal.SIGKILL)
        with (
            TrainerClient(service.grpc, retry_seconds=0) as client,
            pytest.raises(
                Unavailable,
                match="the process that makes weight maps and models of configs has ended with -9",
            ),
        ):
            client.register_model(MODEL, hf_folder)
        with TrainerClient(service.grpc) as client:
            assert client.register_model(MODEL, hf_folder).name == MODEL
        second = child_of(service.process.pid)
        assert second != first
        service.process.kill()
        service.process.wait(60)
        eventually(lambda: not second.exists())  # it ends with the service, its only client


def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        served(tmp_path / "store", drain_seconds=3600.0) as service,
        held_pushes(monkeypatch) as (begun, _),
    ):
        client = TrainerClient(service.grpc, retry_seconds=0, lane="grpc")
        client.register_model(MODEL, hf_folder)
        client.push_folder(MODEL, hf_folder)
        assert begun.wait(60)
        service.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{service.url}/readyz", timeout=60).status_code == 503)
        assert service.stop(signal.SIGINT) == 130


def test_a_signal_is_heard_that_comes_while_the_main_thread_cannot_be_woken(tmp_path: Path) -> None:
    program = """
import os, signal
from weighbridge_service.server import _first_signal
with _first_signal() as wait_for_signal:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of this thread alone: the kernel hands it to another
    os.kill(os.getpid(), signal.SIGTERM)
    print(wait_for_signal(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    wait_for_signal()
"""
    log = tmp_path / "log"
    with log.open("w") as stderr, forked_python("-c", program, stderr=stderr.fileno()) as process:
        assert process.stdout.read() == f"{signal.SIGTERM}\n"
        assert process.wait(60) == 130
    assert log.read_text() == ""


def test_what_is_not_finished_in_time_is_given_up_and_the_exit_code_says_so(
    tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "store", drain_seconds=0.5) as service, held_pushes(monkeypatch) as (begun, _):
        client = TrainerClient(service.grpc, retry_seconds=0, lane="grpc")
        client.register_model(MODEL, hf_folder)
        client.push_folder(MODEL, hf_folder)
        assert begun.wait(60)
        assert service.stop() == 1


def test_ports_in_use_are_said_to_be(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        wrong = {"--grpc": {"grpc": address}, "--http": {"http": address}}
        started = {text: Served(tmp_path / f"store{n}", **wrong[text]) for n, text in enumerate(wrong)}
        for text, service in started.items():
            output, log = service.output()
            assert (service.process.returncode, output) == (1, "")
            assert "weighbridge cannot start: " in log
            assert (
                f"the {'gRPC' if text == '--grpc' else 'HTTP'} address {address} cannot be "
                "bound: Address already in use"
            ) in log
            assert "--grpc 127.0.0.1:" in log
            assert "--http 127.0.0.1:" in log, "both ports are changed, or the next start fails as well"
            assert "Traceback" not in log


def test_a_store_that_cannot_be_made_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    service = Served(tmp_path / "store")
    output, log = service.output()
    assert (service.process.returncode, output) == (1, "")
    assert "weighbridge cannot start: " in log
    assert str(tmp_path / "store") in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    "address", ["", ":80", "host", "host:", "host:x", "host:-1", "host:65536", "host:" + "9" * 9999]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an address"):
        HttpServer(address, 1024)
