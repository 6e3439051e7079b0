"""Worker process of a conversion: copies the bytes that it is told to, from file to file.

It knows nothing of tensors, but for elements to which a constant is added.

Blocks are written past the page cache where the file system allows: they would fill it with what nobody is going to read here, and
getting the pages costs more than the writing. What lies in a block with bytes of others is written through the page cache.

Messages on stdin are pickles behind their length of eight bytes: first a `Job`, then a `Unit` at a time. On stdout it answers
with lines of JSON: ``{"copied": bytes}`` now and then, ``{"done": number}`` when a unit is on the disk, ``{"error": ...}`` when it
cannot go on. It ends when stdin does.
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
"""The error of a source that ends before it should."""
_BLOCK = 4096
"""Whole blocks of this size at multiples of it, in memory as in the file, can be written directly on every device."""
_OPEN_FILES = 128
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What all units have in common.

    Attributes:
        source: paths of the source's files; units name them by index.
        target: folder of the files that are written, which exist with their final sizes.
        buffer_bytes: most that is in memory at once.
    """

    source: tuple[str, ...]
    target: str
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A range of the target that is picked together in memory.

    Attributes:
        to: its first byte.
        length: its bytes; those that no part covers are zero.
        parts: where they come from. Their streams' offsets count from the range's first byte.
        shift: what is added to each element of the range; 0 if nothing is.
        dtype: then, what its elements are.
    """

    to: int
    length: int
    parts: tuple[ByteCopy[int], ...]
    shift: float = 0.0
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work.

    Attributes:
        number: which.
        file: the target file.
        gathers: picked together in memory.
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
    """Open files, the ones used last."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._direct = True
        self._open: OrderedDict[tuple[int, str], int] = OrderedDict()

    def source(self, index: int) -> int:
        return self._get(os.O_RDONLY, self._job.source[index])

    def write(self, name: str, data: memoryview, to: int) -> None:
        """Write bytes that lie in memory as far behind a multiple of the block size as they will in the file."""
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
                self._direct = False  # the file system cannot
        if not self._direct:
            edge = end
        _write(through, data[:edge], to)
        _write(through, data[end:], to + end)

    def sync(self, name: str) -> None:
        """Wait until all that was written to a file is on the disk."""
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
    """Does units.

    Args:
        job: what they have in common.
        answers: where to say how it goes.
    """

    def __init__(self, job: Job, answers: IO[bytes]) -> None:
        self._job = job
        self._files = _Files(job)
        self._answers = answers
        self._buffer = memoryview(mmap.mmap(-1, job.buffer_bytes + _BLOCK))

    def do(self, unit: Unit) -> None:
        """Do one, and say so when it is on the disk."""
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
        """Memory for so many bytes, or fewer, that are to be written to a place in a file."""
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
    """Write one answer."""
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def send(stream: IO[bytes], message: object) -> None:
    """Write one message to a worker's stdin."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(_LENGTH, "little") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next message; None if there is none. It comes from the process that started this one."""
    head = stream.read(_LENGTH)
    data = stream.read(int.from_bytes(head, "little"))
    return pickle.loads(data) if len(head) == _LENGTH else None  # noqa: S301


def main() -> None:
    """Work until stdin ends."""
    # the parent is interrupted as well, and says what is to happen
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
        pass  # the parent is gone
    except OSError as error:
        say(answers, {"error": error.strerror or str(error), "errno": error.errno, "path": error.filename})
