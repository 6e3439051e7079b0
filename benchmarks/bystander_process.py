"""``python -m benchmarks.bystander_process SPEC``: an ordinary client that records how it is served.

SPEC is a `BystanderSpec` as JSON. Each line on standard input ends a window; it is answered by a line on standard
output, the figures of the window as JSON. A call that is still running when a window ends counts with the time that it
has taken so far: a client whose calls are never answered must not look like a client that made none.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import torch

from weighbridge import EngineClient, WeighbridgeError
from weighbridge._transport import rpc
from weighbridge.v1 import model_service_pb2, model_service_pb2_grpc

PROBES = ("/livez", "/readyz", "/metrics")
TAG = "siege"
CALLS, NEW_CLIENTS = "calls", "calls of new clients"
_CALL_SECONDS = 10.0
_PROBE_SECONDS = 5.0
_CALL_PAUSE, _NEW_CLIENT_PAUSE, _PROBE_PAUSE, _PULL_PAUSE = 0.05, 0.5, 0.25, 0.1
_LONGEST_ERROR = 160


@dataclass(frozen=True)
class BystanderSpec:
    """Specification of a bystander.

    Attributes:
        role: ``calls``, of control calls and probes, or ``pulls``.
        grpc: gRPC address of the service.
        http: HTTP address of the service, a URL without scheme.
        model: a model with a version ``live``.
    """

    role: str
    grpc: str
    http: str
    model: str


@dataclass
class Window:
    """Results of one kind of call between two moments.

    Attributes:
        seconds: how long each call took.
        errors: error messages of the failed calls, each text once.
        failed: number of failed calls.
        nbytes: bytes that the calls returned.
        length: length of the window in seconds.
    """

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failed: int = 0
    nbytes: int = 0
    length: float = 0.0


class Repeated:
    """Something that is done again and again, in a thread of its own.

    Args:
        name: name of the task.
        does: does it once; is given what notes bytes that have come.
        pause: seconds in between.
    """

    def __init__(self, name: str, does: Callable[[Callable[[int], None]], object], pause: float) -> None:
        self.name = name
        self._does = does
        self._pause = pause
        self._lock = threading.Lock()
        self._window = Window()
        self._since = time.monotonic()
        self._begun: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def end_window(self) -> Window:
        """End the window and return it; the next one begins."""
        with self._lock:
            now = time.monotonic()
            window, self._window = self._window, Window()
            if self._begun is not None:
                window.seconds.append(now - self._begun)
            window.length, self._since = now - self._since, now
            return window

    def _run(self) -> None:
        while True:
            with self._lock:
                self._begun = time.monotonic()
            error = ""
            try:
                self._does(self._note)
            except (grpc.RpcError, WeighbridgeError, OSError, http.client.HTTPException) as failure:
                error = _short(failure)
            with self._lock:
                self._window.seconds.append(time.monotonic() - self._begun)
                self._begun = None
                if error:
                    self._window.failed += 1
                    if error not in self._window.errors:
                        self._window.errors.append(error)
            time.sleep(self._pause)

    def _note(self, nbytes: int) -> None:
        with self._lock:
            self._window.nbytes += nbytes


def _short(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"[:_LONGEST_ERROR]
    return repr(error)[:_LONGEST_ERROR]


def _calls(spec: BystanderSpec) -> list[Repeated]:
    """Control calls over one connection, others over a new one each, and probes."""
    get = model_service_pb2.GetVersionRequest(model=spec.model, version="live")
    listing = model_service_pb2.ListVersionsRequest(model=spec.model)
    tag = model_service_pb2.SetRefRequest(model=spec.model, ref=TAG, version="live")
    stub = model_service_pb2_grpc.ModelServiceStub(rpc.open_channel(spec.grpc))
    turns: list[Callable[[], object]] = [
        lambda: stub.GetVersion(get, timeout=_CALL_SECONDS),
        lambda: stub.ListVersions(listing, timeout=_CALL_SECONDS),
        lambda: stub.SetRef(tag, timeout=_CALL_SECONDS),
    ]

    def call(_note: Callable[[int], None]) -> None:
        turns.append(turns.pop(0))
        turns[-1]()

    def call_as_new_client(_note: Callable[[int], None]) -> None:
        with rpc.open_channel(spec.grpc, shared=False) as channel:
            model_service_pb2_grpc.ModelServiceStub(channel).GetVersion(get, timeout=_CALL_SECONDS)

    def probe(path: str) -> Callable[[Callable[[int], None]], None]:
        def ask(_note: Callable[[int], None]) -> None:
            connection = http.client.HTTPConnection(spec.http, timeout=_PROBE_SECONDS)
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
                if response.status != http.client.OK:
                    raise OSError(f"{path} answered {response.status}")
            finally:
                connection.close()

        return ask

    return [
        Repeated(CALLS, call, _CALL_PAUSE),
        Repeated(NEW_CLIENTS, call_as_new_client, _NEW_CLIENT_PAUSE),
        *(Repeated(path, probe(path), _PROBE_PAUSE) for path in PROBES),
    ]


def _pulls(spec: BystanderSpec) -> list[Repeated]:
    """Pulls into tensors that are there already."""
    client = EngineClient(spec.grpc, lane="grpc")
    tensors = [torch.empty_like(tensor) for _, tensor in client.pull(spec.model, "live")]

    def pull(note: Callable[[int], None]) -> None:
        for _, tensor in client.pull(spec.model, "live").filled(tensors.__getitem__):
            note(tensor.nbytes)

    return [Repeated("pulls", pull, _PULL_PAUSE)]


def main(argv: Sequence[str]) -> None:
    """Do it until standard input ends."""
    spec = BystanderSpec(**json.loads(argv[0]))
    repeated = _calls(spec) if spec.role == "calls" else _pulls(spec)
    print(spec.role, flush=True)
    for _ in sys.stdin:
        windows: dict[str, Any] = {each.name: asdict(each.end_window()) for each in repeated}
        print(json.dumps(windows), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
