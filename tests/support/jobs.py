"""Jobs in other environments: a process that serves requests over a pipe. Needs nothing but Python."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class JobFailed(Exception):
    """A request to a job has raised."""


class Job:
    """A running job, which serves requests for its methods.

    Args:
        link: connection to the job.
        log: file of its output.
    """

    def __init__(self, link: Connection[Any, Any], log: Path) -> None:
        self._link = link
        self._log = log

    def begin(self, name: str, /, **arguments: Any) -> None:
        """Send a request; `answer` waits for its answer."""
        self._link.send((name, arguments))

    def answer(self, seconds: float = 600) -> Any:
        """Answer of the job to the last request.

        Raises:
            JobFailed: the request raised; carries that error's text.
        """
        if not self._link.poll(seconds):
            raise TimeoutError(f"the job did not answer within {seconds:g} s:\n{self._end_of_log()}")
        try:
            done, value = self._link.recv()
        except EOFError:
            raise AssertionError(f"the job has ended:\n{self._end_of_log()}") from None
        if not done:
            raise JobFailed(value)
        return value

    def outcome(self, seconds: float = 600) -> Any:
        """As `answer`; returns the `JobFailed` instead of raising it."""
        try:
            return self.answer(seconds)
        except JobFailed as failed:
            return failed

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Result of a method of the job."""
        self.begin(name, **arguments)
        return self.answer()

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[Job]:
    """A job that has received no request yet; ended when the block ends.

    Args:
        command: command that starts the job; the descriptor of its end of the pipe is appended.
        log: file of its output.
        environment: its environment variables.
        folder: working directory of the job.
    """
    mine, theirs = Pipe()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            cwd=folder,
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        try:
            with mine:
                yield Job(mine, log)
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def serve(job: object) -> None:
    """Answer, in the process of a job, until the pipe is closed."""
    with Connection(int(sys.argv[-1])) as link:
        while True:
            try:
                name, arguments = link.recv()
            except EOFError:
                return
            try:
                link.send((True, getattr(job, name)(**arguments)))
            except Exception as error:
                traceback.print_exc()
                link.send((False, str(error)))
