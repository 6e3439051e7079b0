"""Worker process of a conversion: copies ranges of bytes from file to file, as its parent requests.

It does not know about tensors, except for elements to which a constant is added.

Whole blocks bypass the page cache if the file system allows it: the data is not read again on this machine, and
allocating the pages costs more than the write. Partial blocks, which share a block with other bytes, are written
through the page cache.

Messages on stdin are pickles, each after its length in eight bytes: first a `Job`, then one `Unit` at a time. The
worker replies on stdout with lines of JSON: ``{"copied": bytes}`` for progress, ``{"done": number}`` when a unit is on
disk, ``{"error": ...}`` when it cannot continue. It exits at the end of stdin.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import DType
from weighbridge._memory.file_reads import read_into

TOO_SHORT = "too short"
"""The error for a truncated source file."""
_BLOCK = 4096
"""Block size for direct writes on every device. Memory and file offsets must be multiples of it."""
_OPEN_FILES = 128
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters that all units share.

    Attributes:
        source: paths of the source's files; units refer to them by index.
        target: folder of the target files, which already exist with their final sizes.
        buffer_bytes: bytes of the buffer.
    """

    source: tuple[str, ...]
    target: str
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A range of the target that is gathered in memory.

    Attributes:
        to: offset of the range in the target file.
        length: number of bytes; bytes that no part covers are zero.
        parts: copies from source files. Their stream offsets count from the first byte of the range.
        shift: constant that is added to each element of the range; 0 if none is added.
        dtype: dtype of the elements if a constant is added; otherwise None.
    """

    to: int
    length: int
    parts: tuple[ByteCopy[int], ...]
    shift: float = 0.0
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of work.

    Attributes:
        number: number of the unit.
        file: name of the target file.
        gathers: ranges of the target to write.
    """

    number: int
    file: str
    gathers: tuple[Gather, ...]


class _Failed(Exception):
    def __init__(self, what: str, path: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = path


class _Files:
    """The most recently used open files."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._direct = True
        self._open: OrderedDict[tuple[int, str], int] = OrderedDict()

    def source(self, index: int) -> int:
        return self._get(os.O_RDONLY, self._job.source[index])

    def write(self, name: str, data: memoryview, to: int) -> None:
        """Write bytes to a file. Their address and their file offset must be equal modulo the block size."""
        edge = min(-to % _BLOCK, len(data))
        end = edge + (len(data) - edge) // _BLOCK * _BLOCK
        path = os.path.join(self._job.target, name)
        through = self._get(os.O_RDWR, path)
        if self._direct and end > edge:
            try:
                _write(self._get(os.O_RDWR | os.O_DIRECT, path), data[edge:end], to + edge)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct = False  # the file system does not support direct writes
        if not self._direct:
            edge = end
        _write(through, data[:edge], to)
        _write(through, data[end:], to + end)

    def sync(self, name: str) -> None:
        """Wait until all written bytes of a file are on disk."""
        os.fdatasync(self._get(os.O_RDWR, os.path.join(self._job.target, name)))

    def _get(self, flags: int, path: str) -> int:
        fd = self._open.get((flags, path))
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            fd = self._open[flags, path] = os.open(path, flags | os.O_CLOEXEC)
        self._open.move_to_end((flags, path))
        return fd


class Worker:
    """Executes units.

    Args:
        job: parameters of all units.
        answers: stream for replies to the parent.
    """

    def __init__(self, job: Job, answers: IO[bytes]) -> None:
        self._job = job
        self._files = _Files(job)
        self._answers = answers
        self._buffer = memoryview(mmap.mmap(-1, job.buffer_bytes + _BLOCK))

    def do(self, unit: Unit) -> None:
        """Execute a unit, and reply once its bytes are on disk."""
        for gather in unit.gathers:
            self._gather(gather, unit.file)
        self._files.sync(unit.file)
        self._say({"done": unit.number})

    def _gather(self, gather: Gather, name: str) -> None:
        room = self._room(gather.to, gather.length)
        buffer = np.frombuffer(room, np.uint8)
        if sum(_volume(part.extent) for part in gather.parts) < gather.length:
            buffer[:] = 0
        for part in gather.parts:
            target = np.ndarray(part.extent, np.uint8, buffer, part.stream_offset, part.stream_strides)
            try:
                read_into(self._files.source(part.file), target, part.file_offset, part.file_strides)
            except EOFError as error:
                raise _Failed(TOO_SHORT, self._job.source[part.file]) from error
        if gather.dtype is not None:
            from weighbridge._formats.shifts import shifted

            buffer[:] = shifted(buffer, gather.dtype, gather.shift)
        self._files.write(name, room, gather.to)
        self._say({"copied": gather.length})

    def _room(self, to: int, length: int) -> memoryview:
        """Part of the buffer for at most ``length`` bytes, aligned for a write to the file offset ``to``."""
        start = to % _BLOCK
        return self._buffer[start : start + min(length, self._job.buffer_bytes)]

    def _say(self, answer: dict[str, Any]) -> None:
        say(self._answers, answer)


def _volume(shape: tuple[int, ...]) -> int:
    found = 1
    for extent in shape:
        found *= extent
    return found


def _write(fd: int, data: memoryview, to: int) -> None:
    while data:
        written = os.pwrite(fd, data, to)
        data, to = data[written:], to + written


def say(answers: IO[bytes], answer: dict[str, Any]) -> None:
    """Send one reply to the parent."""
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def send(stream: IO[bytes], message: object) -> None:
    """Send one message to a worker's stdin."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(_LENGTH, "little") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream.

    Unpickling is safe because the parent process sends the messages.
    """
    head = stream.read(_LENGTH)
    data = stream.read(int.from_bytes(head, "little"))
    return pickle.loads(data) if len(head) == _LENGTH else None  # noqa: S301


def main() -> None:
    """Execute units until the end of stdin."""
    # the parent also receives SIGINT, and decides how to continue
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        worker = Worker(_receive(requests), answers)
        while True:
            unit = _receive(requests)
            if unit is None:
                break
            worker.do(unit)
    except _Failed as failed:
        say(answers, {"error": failed.what, "path": failed.path})
    except BrokenPipeError:
        pass  # the parent has exited
    except OSError as error:
        say(answers, {"error": error.strerror or str(error), "errno": error.errno, "path": error.filename})
