"""Service process beside a program: started, and ended for certain."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from weighbridge.errors import Unavailable

_READY_LINE = re.compile(r"^weighbridge serving gRPC on (\S+), HTTP on (\S+), store ", re.MULTILINE)
_START_SECONDS = 90.0
_STOP_SECONDS = 30.0


class ServiceProcess:
    """``weighbridge serve`` on free ports of loopback; a context that ends it.

    Args:
        store: folder or location where the service keeps versions.
        logs: folder for what it prints, ``service.out`` and ``service.log``.
        scratch: folder for what may be lost; None for the service's default.

    Attributes:
        store: the store.
        log: file of the service's log.
    """

    def __init__(self, store: Path | str, logs: Path, scratch: Path | None = None) -> None:
        self.store = store
        self.log = logs / "service.log"
        self._out = logs / "service.out"
        command = [
            sys.executable, "-m", "weighbridge", "serve", "--store", str(store),
            "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0",
            *(() if scratch is None else ("--scratch", str(scratch))),
        ]  # fmt: skip
        with self._out.open("w") as out, self.log.open("w") as log:
            # A session of its own: Ctrl-C goes to the program, and the program tells the service.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> tuple[str, str]:
        """Its gRPC address and its HTTP address, once it serves.

        Raises:
            Unavailable: it ended, or does not serve in time; has the end of its log.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            ready = _READY_LINE.search(self._out.read_text())
            if ready:
                return ready[1], ready[2]
            if self._process.poll() is not None:
                raise Unavailable(
                    f"the service ended with exit code {self._process.returncode}", details=self._log_end()
                )
            time.sleep(0.05)
        raise Unavailable(f"the service did not start within {_START_SECONDS:g} s", details=self._log_end())

    def _log_end(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-10:]

    def wait(self) -> int:
        """Wait until it ends without being asked here, and give its exit code."""
        return self._process.wait()

    def stop(self) -> int:
        """Ask it to end, make it end if it does not, and give its exit code."""
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            self._process.kill()  # does nothing to a process that has ended
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
