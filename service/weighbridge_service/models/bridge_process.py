"""Process that makes bridges for the service and compares tensors with transformers' models.

It imports torch, transformers and mbridge.

The import of torch uses 400 MB and blocks a Python process for long periods, which would delay every call and stream of
the service. So the service calls a separate process of the same Python, which returns only data: names, shapes, and the
places of elements.
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
from weighbridge_service.models.library_models import LoaderComparison, compare_with_library
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
"""Config of the bridge that a new process makes before it serves calls, so that all modules are imported by then."""

_CALLS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (make_bridge, compare_with_library)
}
"""Functions that the process serves, by name."""
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""megatron-core compiles small functions where it defines them, for which torch imports its compiler. This process does
not compute with tensors.
"""
_MOST_SECONDS = 300.0
"""Maximum seconds to make one bridge, including the imports of a new process. The largest models need a few seconds."""

_MOST_SECONDS_OF_CALL = 60.0
_MOST_BYTES = 4 << 30
"""Maximum bytes of memory that one call may use, without the imports of a new process.

The largest models need a few hundred MB.
"""


class BridgeProcess:
    """Separate process that makes bridges. It runs until `close`, and is restarted if it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the process, which imports its modules in the background for some seconds.

        Raises Unavailable if it cannot be started.

        Does nothing during a call, because the call has already started the process, and may hold the lock until the
        imports are done.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._connected()
            finally:
                self._lock.release()

    def bridge(self, config_json: bytes, absent: Sequence[str]) -> Bridge:
        """As `weighbridge_service.models.bridges.make_bridge`.

        Raises:
            Unavailable: the process has died, has not responded for minutes, or cannot be started.
            WeighbridgeError: as `make_bridge`.
        """
        bridge: Bridge = self._asked(make_bridge, config_json, tuple(absent))
        return bridge

    def compare(self, config_json: bytes, shapes: Mapping[str, Shape]) -> LoaderComparison | None:
        """As `weighbridge_service.models.library_models.compare_with_library`.

        Raises:
            Unavailable: as `bridge`.
            WeighbridgeError: as `compare_with_library`.
        """
        found: LoaderComparison | None = self._asked(compare_with_library, config_json, dict(shapes))
        return found

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function of `_CALLS`, called in the process."""
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
                    fix=(
                        "try again: another one is started; if that ends too, see the service's "
                        "log, and check how much memory is free"
                    ),
                ) from error
        if isinstance(made, WeighbridgeError):
            raise made
        return made

    def close(self) -> None:
        """Kill the process, even during a call, and do not start another. A waiting caller gets `Unavailable`."""
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
                        stdout=2,  # the service writes one line to its stdout, and nothing else may
                        pass_fds=[theirs.fileno()],
                    )
                except OSError as error:
                    ours.close()
                    raise Unavailable(
                        f"the process that makes weight maps cannot be started: {error}",
                        fix="check the limits on processes, descriptors and memory",
                    ) from error
            self._connection = ours
            count_helper(self._process.pid)
            if self._closed.is_set():  # `close` was called before the process existed
                self._process.kill()
        return self._connection

    def _end(self) -> str:
        """Kill the process if it exists. Returns a string with its exit code; empty if it had not exited."""
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
    """Limit the memory and time of the block, because a config determines how long the lists of libraries get. Only for
    the main thread of a process.

    Args:
        nbytes: bytes of memory beyond the current use; a larger allocation raises MemoryError, or the RuntimeError of
            torch.
        seconds: seconds after which a TimeoutError is raised.
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
    """Bytes of memory of this process that `RLIMIT_DATA` counts: private and writable."""
    found = re.search(r"^VmData:\s*(\d+) kB$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def serve(connection: Connection) -> None:
    """Execute the calls of the process at the other end until it closes the connection."""
    # the service ends this process, after its last push
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # imported objects are never freed, and garbage collection would take a fifth of the import time
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
        except Exception as error:  # from a family's own code
            traceback.print_exc()
            told = f"no weight map can be made of this config.json: {type(error).__name__}: {error}"[:500]
            answer = pickle.dumps(InvalidArgument(told))
        connection.send_bytes(answer)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as parent, contextlib.suppress(BrokenPipeError):
        serve(parent)
