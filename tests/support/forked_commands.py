"""The command ``weighbridge`` for shell scripts of tests: on their PATH, and forked from what has imported everything.

A script that starts Python itself pays seconds of a core for the imports of each service. The command on this PATH is a
few lines that hand their arguments, environment and output over to the test's process, which runs them by
`ForkedPython`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.forked import ForkedPython

_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({socket!r})
    socket.send_fds(asked, [json.dumps([sys.argv[1:], dict(os.environ)]).encode()], [1, 2])
    signal.signal(signal.SIGTERM, lambda *_: asked.send(b"T"))
    answer = asked.recv(1)
sys.exit(answer[0] if answer else 1)
"""


class ForkedCommands:
    """A folder with the command, and the processes that it stands for.

    They run in the working directory of the test's process. SIGTERM to a command is one to its process.

    Attributes:
        environment: environment variables of scripts that find the command; a copy of this process's own.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        self._processes: list[ForkedPython] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen()
        command = folder / "weighbridge"
        command.write_text(_COMMAND.format(python=sys.executable, socket=str(folder / "socket")))
        command.chmod(0o755)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all that still run, and take no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for process in self._processes:
            process.terminate()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            message, (out, err), _, _ = socket.recv_fds(connection, 1 << 20, 2)
            arguments, environment = json.loads(message)
            try:
                process = ForkedPython("-m", "weighbridge", *arguments, stderr=err, environment=environment)
                with process:
                    self._processes.append(process)
                    threading.Thread(target=_forward, args=(connection, process), daemon=True).start()
                    for line in process.stdout:
                        os.write(out, line.encode())
                    connection.sendall(bytes([process.wait(60) & 255]))
            finally:
                os.close(out)
                os.close(err)


def _forward(connection: socket.socket, process: ForkedPython) -> None:
    with suppress(OSError):  # the command has its answer
        if connection.recv(1) == b"T":
            process.terminate()


@contextmanager
def forked_commands(folder: Path) -> Iterator[ForkedCommands]:
    """Such a folder, which is made."""
    commands = ForkedCommands(folder)
    try:
        yield commands
    finally:
        commands.close()
