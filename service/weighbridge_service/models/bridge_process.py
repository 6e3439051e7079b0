"""Process that makes bridges for the service, and compares tensors with transformers' models: torch, transformers and mbridge are imported there.

Importing torch keeps a Python process from everything else for long stretches, which each call and stream of the service would wait for, and
takes 400 MB. So the service asks a process of its own, of the same Python. Only data comes back: names, shapes, and where elements go.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from weighbridge.errors import InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_service.families.rules import Shape
from weighbridge_service.models.bridges import Bridge, make_bridge
from weighbridge_service.models.library_models import Comparison, compare_with_library
from weighbridge_storage.memory.memory_limits import count_helper, forget_helper

_FIRST_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}
"""What a new process makes a bridge of before it is asked for one: all is imported then."""

_CALLS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (make_bridge, compare_with_library)
}
"""What the process is asked for, by name."""
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""megatron-core has small functions compiled where they are defined, for which torch imports its compiler. Nothing is computed here."""
_MOST_SECONDS = 300.0
"""For one bridge, the imports of a new process included: the largest models take some seconds."""

_MOST_SECONDS_OF_CALL = 60.0
_MOST_BYTES = 4 << 30
"""For one call, without the imports of a new process: the largest models take some hundred MB."""


class BridgeProcess:
    """Makes bridges in a process of its own, which lives until `close` and is started again if it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Let the process import what it needs, which takes seconds; returns at once. Raises Unavailable if it cannot be started.

        A call that is being answered has started it already, and may hold the lock for as long as these imports take.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._connected()
            finally:
                self._lock.release()

    def bridge(self, config_json: bytes, absent: Sequence[str]) -> Bridge:
        """As `weighbridge_service.models.bridges.make_bridge`.

        Raises:
            Unavailable: the process has died, answers nothing for minutes, or cannot be started.
            WeighbridgeError: as `make_bridge`.
        """
        bridge: Bridge = self._asked(make_bridge, config_json, tuple(absent))
        return bridge

    def compare(self, config_json: bytes, shapes: Mapping[str, Shape]) -> Comparison | None:
        """As `weighbridge_service.models.library_models.compare_with_library`.

        Raises:
            Unavailable: as `bridge`.
            WeighbridgeError: as `compare_with_library`.
        """
        found: Comparison | None = self._asked(compare_with_library, config_json, dict(shapes))
        return found

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of `_CALLS` gives in the process."""
        with self._lock:
            connection = self._connected()
            try:
                connection.send((function.__name__, arguments))
                if not connection.poll(_MOST_SECONDS):
                    raise TimeoutError
                made = connection.recv()
            except (EOFError, OSError) as error:
                raise Unavailable(
                    f"the process that makes weight maps and models of configs has ended{self._end()}",
                    fix="try again: another one is started; if that ends too, look at the service's log, and at how much memory there is",
                ) from error
        if isinstance(made, WeighbridgeError):
            raise made
        return made

    def close(self) -> None:
        """End the process, whatever it is doing: whoever waits for it gets `Unavailable`, and no further one is started."""
        self._closed.set()
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _connected(self) -> Connection:
        if self._closed.is_set():
            raise Unavailable("the service is shutting down")
        if self._connection is None:
            ours, theirs = Pipe()
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                        env={
                            **os.environ,
                            **_ENVIRONMENT,
                            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # the service's own has one line
                        pass_fds=[theirs.fileno()],
                    )
                except OSError as error:
                    ours.close()
                    raise Unavailable(
                        f"the process that makes weight maps cannot be started: {error}",
                        fix="look at the limits of processes, descriptors and memory",
                    ) from error
            self._connection = ours
            count_helper(self._process.pid)
            if self._closed.is_set():  # meanwhile, when there was none to be killed
                self._process.kill()
        return self._connection

    def _end(self) -> str:
        """End the process if there is one; how it ended by itself."""
        if self._connection is None or self._process is None:
            return ""
        self._connection.close()
        self._connection = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        forget_helper(self._process.pid)
        return "" if code is None else f" with {code}"


@contextlib.contextmanager
def bounded(nbytes: int, seconds: float) -> Iterator[None]:
    """Bounds of what the block takes, in the main thread of a process without the service: code of libraries makes lists of numbers in a config.

    Args:
        nbytes: of memory more than now; what asks for more gets a MemoryError, or the RuntimeError of torch.
        seconds: after which a TimeoutError is raised.
    """

    def end(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + nbytes
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def _data_bytes() -> int:
    """Memory of this process that `RLIMIT_DATA` counts: what it may write and shares with no other one."""
    found = re.search(r"^VmData:\s*(\d+) kB$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def serve(connection: Connection) -> None:
    """Answer calls of the process at the other end, until it is closed."""
    # whoever started this process ends it, after its last push
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # what is imported stays: to look for garbage in between takes a fifth of the time
    make_bridge(json.dumps(_FIRST_CONFIG).encode())
    gc.freeze()
    gc.enable()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            with bounded(_MOST_BYTES, _MOST_SECONDS_OF_CALL):
                answer = pickle.dumps(_CALLS[name](*arguments))
        except WeighbridgeError as error:
            answer = pickle.dumps(error)
        except Exception as error:  # of a family's own code
            traceback.print_exc()
            told = f"no weight map can be made of this config.json: {type(error).__name__}: {error}"[:500]
            answer = pickle.dumps(InvalidArgument(told))
        connection.send_bytes(answer)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as parent, contextlib.suppress(BrokenPipeError):
        serve(parent)
