"""Programs at a terminal of their own: what is typed there, and what is shown."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self


class Terminal:
    """A program at a terminal.

    Args:
        line: its arguments.
        environment: its variables; ``PATH`` and the language are those of the tests unless named.
        columns, rows: size of the terminal.
    """

    def __init__(
        self, line: Sequence[str], environment: Mapping[str, str], *, columns: int = 100, rows: int = 40
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "PATH") if name in os.environ}
        self.process = subprocess.Popen(
            line,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # to be the terminal that it controls
            env={**kept, "TERM": "xterm", **environment},
        )
        os.close(slave)
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def said(self, typed: str, wanted: str, seconds: float = 60) -> str:
        """Type a text, and wait until another one is shown; returns what was shown since."""
        self.shown = ""
        os.write(self.master, typed.encode())
        end = time.monotonic() + seconds
        while wanted not in self.shown:
            assert time.monotonic() < end, self.shown
            if not self._read():
                raise AssertionError(f"it has ended: {self.shown}")
        return self.shown

    def ended(self, seconds: float = 60) -> int:
        """Wait until the program has ended and all its output has come; returns its exit code."""
        end = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < end, self.shown
        return self.process.wait(seconds)

    def _read(self) -> bool:
        """Read the output that has come; returns whether the program still has the terminal open."""
        if not select.select([self.master], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # no process has the other end open
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
