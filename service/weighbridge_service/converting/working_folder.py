"""Working folder next to the target of a conversion. An interrupted conversion resumes from it.

``TARGET.converting/`` contains ``files/``, which is renamed to TARGET at the end, ``journal``, and ``lock``, which a
running conversion and its workers hold. The journal's first line is the identity of the conversion. Each further line
is the number of a unit whose bytes are on disk. The last line is ``complete`` when only the rename is left. A truncated
line is ignored.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted
from weighbridge_service.converting.conversions import Conversion

SUFFIX = ".converting"
_COMPLETE = "complete"
_NUMBER = re.compile(r"[0-9]{1,12}")
LOCK_SECONDS = 10.0


@contextmanager
def room(what: Path) -> Iterator[None]:
    """Translate the operating system's errors for a full disk; other errors pass unchanged.

    Raises:
        ResourceExhausted: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(what) from error
        raise


def disk_full(what: Path) -> ResourceExhausted:
    """The error of a full disk."""
    return ResourceExhausted(
        f"the disk is full: {what} cannot be written",
        fix="make room and run the same command again: it continues where it stopped",
    )


class WorkingFolder:
    """The folder of one conversion. Only one process at a time holds its lock, until `close`.

    Args:
        target: target of the conversion.
        lock_seconds: seconds to wait for the lock: workers of a killed run hold it until they have finished their
            current units.

    Raises:
        AlreadyExists: another process converts to the same target.
        FailedPrecondition: the folder is a symbolic link.
    """

    def __init__(self, target: Path, lock_seconds: float = LOCK_SECONDS) -> None:
        self.target = target
        self.path = target.with_name(target.name + SUFFIX)
        self.files = self.path / "files"
        self._journal = self.path / "journal"
        self._stream = -1  # descriptor of the journal, opened by `begin`
        for path in (self.path, self.files):
            if path.is_symlink():
                raise FailedPrecondition(f"{path} is a symbolic link, and its target must not be changed")
        deadline = time.monotonic() + lock_seconds
        while (lock := self._try_lock()) is None:
            if time.monotonic() > deadline:
                raise AlreadyExists(f"another process is converting to {self.target}", fix="wait until it is done")
            time.sleep(0.05)
        self.lock = lock

    def _try_lock(self) -> int | None:
        """The lock's descriptor; None if another process holds it."""
        name = self.path / "lock"
        with room(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the previous holder may have removed the folder after this open, and another process may have created a
            # new one
            if os.path.samestat(os.fstat(lock), name.stat()):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return None

    @staticmethod
    def left_behind(target: Path) -> bool:
        """Whether an earlier run has left a working folder with a journal."""
        return (target.with_name(target.name + SUFFIX) / "journal").exists()

    def begin(self, conversion: Conversion, identity: str, *, restart: bool) -> set[int]:
        """Create the files, or resume with those of an earlier run.

        Args:
            conversion: the conversion.
            identity: identity of its units; see `Units.identity`.
            restart: whether to discard the files of an earlier run.

        Returns:
            Numbers of the units that are already done.

        Raises:
            FailedPrecondition: an earlier run converted another source or used other options.
            ResourceExhausted: the disk does not have enough space.
        """
        found, done = self._read()
        if found is not None and found != identity and not restart:
            raise FailedPrecondition(
                f"{self.path} is left over from a conversion of a different source, with "
                "different options, or of a source that has "
                "changed since",
                fix=f"run again with --restart to discard it and start over, or remove {self.path}",
            )
        # a missing file, a wrong size or an unknown file means that another program has changed the folder, so the
        # journal cannot be trusted
        whole = self.is_whole(self.files, conversion) and self._has_nothing_else(conversion)
        with room(self.path):
            if found != identity or restart or not whole:
                # the journal is deleted first: its entries must never refer to files that are created again
                done = set()
                self._journal.unlink(missing_ok=True)
                _sync_folder(self.path)
                shutil.rmtree(self.files, ignore_errors=True)
            self._check_room(conversion)
            self._write(conversion)
            self._write_journal([identity, *map(str, sorted(done))])
            self._stream = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        return done

    def _write_journal(self, lines: list[str]) -> None:
        part = self._journal.with_suffix(".part")
        with part.open("w", encoding="ascii") as stream:
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self._journal)
        _sync_folder(self.path)

    def add(self, number: int) -> None:
        """Record in the journal that a unit is on disk."""
        self._append(str(number))

    def _append(self, line: str) -> None:
        with room(self._journal):
            os.write(self._stream, f"{line}\n".encode("ascii"))
            os.fdatasync(self._stream)

    def finish(self, conversion: Conversion) -> None:
        """Write the other files, rename the folder to the target, and remove the working folder.

        Raises:
            AlreadyExists: the target was created in the meantime.
            ResourceExhausted: the disk is full.
        """
        with room(self.files):
            for name, content in conversion.side_files.items():
                path = self.files / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for folder in {path.parent for path in self.files.rglob("*")}:
                _sync_folder(folder)
            self._append(_COMPLETE)
            try:
                if self.target.exists():
                    self.target.rmdir()
                self.files.rename(self.target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise AlreadyExists(
                    f"{self.target} exists now: another process created it while this conversion ran",
                    fix="move it away and run the same command again: only the rename is left to do",
                ) from error
            _sync_folder(self.target.parent)
        self.remove()

    @staticmethod
    def is_whole(folder: Path, conversion: Conversion) -> bool:
        """Whether a folder contains all tensor files of the conversion in their expected sizes."""
        return all(_size(folder / file.name) == file.nbytes for file in conversion.files)

    def _has_nothing_else(self, conversion: Conversion) -> bool:
        known = {*(file.name for file in conversion.files), *conversion.side_files}
        return all(path.is_dir() or str(path.relative_to(self.files)) in known for path in self.files.rglob("*"))

    def has_files(self) -> bool:
        """Whether an earlier run has left files that were not renamed to the target."""
        return self.files.exists()

    def was_finished(self, identity: str) -> bool:
        """Whether the earlier run was the same conversion and had only to remove this folder."""
        return self._read()[0] == identity and self._is_complete() and not self.files.exists()

    def remove(self) -> None:
        """Remove the working folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        if self._stream >= 0:
            os.close(self._stream)
        os.close(self.lock)

    def _lines(self) -> list[str]:
        try:
            text = self._journal.read_text("ascii", errors="replace")
        except FileNotFoundError:
            return []
        return text.split("\n")[:-1]

    def _is_complete(self) -> bool:
        return self._lines()[-1:] == [_COMPLETE]

    def _read(self) -> tuple[str | None, set[int]]:
        """Identity of the conversion of an earlier run, or None, and the numbers of the units that it has done."""
        lines = self._lines()
        if not lines:
            return None, set()
        return lines[0], {int(line) for line in lines[1:] if _NUMBER.fullmatch(line)}

    def _check_room(self, conversion: Conversion) -> None:
        there = 0
        for file in conversion.files:
            if _size(self.files / file.name) is not None:
                there += (self.files / file.name).stat().st_blocks * 512
        state = os.statvfs(self.path)
        free, needed = state.f_bavail * state.f_frsize, conversion.nbytes - there
        if needed > free:
            raise ResourceExhausted(
                f"{self.target} needs {needed} more bytes, and the disk has {free} left",
                fix="make room, or name a target on another disk",
            )

    def _write(self, conversion: Conversion) -> None:
        """Create the files with their final sizes, and write their framing: all bytes that are not tensors."""
        self.files.mkdir(exist_ok=True)
        for new in conversion.files:
            if Path(new.name).name != new.name:
                raise InvalidArgument(f"{new.name[:80]!r} is not a file name")
            fd = os.open(self.files / new.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(fd, new.nbytes)
                for offset, data in new.framing:
                    if os.pwrite(fd, data, offset) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fdatasync(fd)
            finally:
                os.close(fd)
        _sync_folder(self.files)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
