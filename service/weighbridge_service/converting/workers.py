"""Worker processes that execute units, and the errors of a conversion when one of them fails or dies."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

from weighbridge.errors import DataLoss, FailedPrecondition, Unavailable, WeighbridgeError
from weighbridge_service.converting.units import Range, Units
from weighbridge_service.converting.worker import TOO_SHORT, Job, send
from weighbridge_service.converting.working_folder import disk_full

_END_SECONDS = 10.0
_WORKER = "from weighbridge_service.converting.worker import main; main()"


def run_units(
    units: Units,
    todo: Sequence[Range],
    job: Job,
    workers: int,
    lock: int,
    on_copied: Callable[[int], None],
    on_done: Callable[[Range], None],
) -> None:
    """Execute units on several processes.

    Args:
        units: units of the conversion.
        todo: ranges of the units to execute.
        job: parameters of all units.
        workers: number of processes.
        lock: descriptor that every process keeps open, so that the working folder stays locked until the last one has
            ended.
        on_copied: called with the number of bytes copied, by any thread.
        on_done: called with the range of each unit that is on disk, by any thread.

    Raises:
        Unavailable: a worker died.
        DataLoss: a source file is shorter than it was.
        ResourceExhausted: the disk is full.
        FailedPrecondition: a file cannot be read or written.
    """
    waiting = _Waiting(todo)
    events: queue.Queue[BaseException | None] = queue.Queue()
    running = [_Running(units, job, lock, waiting, events, on_copied, on_done) for _ in range(workers)]
    try:
        for one in running:
            one.start()
        for _ in running:
            # with a timeout, because a wait without one cannot be interrupted on every platform
            problem = _next(events)
            if problem is not None:
                raise problem
    finally:
        for one in running:
            one.stop()


def _next(events: queue.Queue[BaseException | None]) -> BaseException | None:
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=1)


class _Waiting:
    """Queue of units that no worker has begun. Units of files without a writer come first."""

    def __init__(self, todo: Sequence[Range]) -> None:
        self._by_file: dict[str, list[Range]] = {}
        for covered in reversed(todo):
            self._by_file.setdefault(covered.file, []).append(covered)
        self._by_file = dict(reversed(self._by_file.items()))
        self._writers: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, last: str | None) -> Range | None:
        """The next unit for a worker whose last unit belonged to the file ``last``; None if no unit is left."""
        with self._lock:
            if last is not None:
                self._writers[last] -= 1
            # one writer per file while there are enough files, because file systems serialise writers of one file
            file = min(
                self._by_file,
                key=lambda f: (self._writers.get(f, 0), f != last),
                default=None,
            )
            if file is None:
                return None
            taken = self._by_file[file].pop()
            if not self._by_file[file]:
                del self._by_file[file]
            self._writers[file] = self._writers.get(file, 0) + 1
            return taken


class _Running:
    """One worker process, and the thread that communicates with it."""

    def __init__(
        self,
        units: Units,
        job: Job,
        lock: int,
        waiting: _Waiting,
        events: queue.Queue[BaseException | None],
        on_copied: Callable[[int], None],
        on_done: Callable[[Range], None],
    ) -> None:
        self._units = units
        self._job = job
        self._lock = lock
        self._waiting = waiting
        self._events = events
        self._on_copied = on_copied
        self._on_done = on_done
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the process, and a thread that sends it units until none are left."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._lock,),
        )
        self._thread = threading.Thread(target=self._run, args=(self._process,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Terminate the process, even in the middle of a unit, and join the thread."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _run(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self._work(process)
        except BaseException as error:
            self._events.put(error)
        else:
            self._events.put(None)

    def _work(self, process: subprocess.Popen[bytes]) -> None:
        requests = cast("IO[bytes]", process.stdin)
        try:
            send(requests, self._job)
            covered = self._waiting.take(None)
            while covered is not None:
                send(requests, self._units.unit(covered))
                self._await(process, covered)
                covered = self._waiting.take(covered.file)
            requests.close()
        except BrokenPipeError as error:
            raise self._last_words(process) from error
        process.wait()

    def _last_words(self, process: subprocess.Popen[bytes]) -> WeighbridgeError:
        """The error of a process that has closed its stdin: the error in its last reply, or else that it died."""
        for line in cast("IO[bytes]", process.stdout):
            if line.endswith(b"\n") and "error" in (answer := json.loads(line)):
                return self._problem(answer)
        return self._died(process)

    def _await(self, process: subprocess.Popen[bytes], covered: Range) -> None:
        answers = cast("IO[bytes]", process.stdout)
        copied = 0
        while True:
            line = answers.readline()
            if not line.endswith(b"\n"):
                raise self._died(process)
            answer: dict[str, Any] = json.loads(line)
            if "copied" in answer:
                copied += answer["copied"]
                self._on_copied(answer["copied"])
            elif "done" in answer:
                # zero bytes are not copied, so they are counted here
                self._on_copied(covered.nbytes - copied)
                self._on_done(covered)
                return
            else:
                raise self._problem(answer)

    def _problem(self, answer: dict[str, Any]) -> WeighbridgeError:
        what, path = answer["error"], answer.get("path")
        if what == TOO_SHORT:
            return DataLoss(f"{path} ends before it should: it has changed since this conversion began")
        if answer.get("errno") in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(Path(self._job.target))
        return FailedPrecondition(f"{path or self._job.target}: {what}")

    @staticmethod
    def _died(process: subprocess.Popen[bytes]) -> WeighbridgeError:
        code = process.wait()
        how = f"with exit code {code}"
        if code < 0:
            how = f"of signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                how += ", perhaps because the machine has no memory left"
        return Unavailable(
            f"a worker process died {how}",
            fix="run the same command again: it continues where it stopped; with --workers 1 it needs less memory",
        )
