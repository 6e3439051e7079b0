"""Folder of adapters on one host. Each version has its own folder in peft's format.

All processes of the host that use the same cache share it.

A process that may have a version loaded holds a shared lock on a file beside its folder. Versions that exceed the
limits are removed, least recently used first, by any process that gets the exclusive lock. A process that dies releases
its locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.vllm_adapters.names import FOLDER

Fetch = Callable[[Path], object]
"""Writes an adapter into a new folder."""
_LOCK = ".lock"
_NEW, _OLD = ".new-", ".old-"
_LEFT_SECONDS = 3600.0
"""Age at which an incomplete folder of a process that died is removed."""


@dataclass
class FolderHold:
    """An adapter's folder, which is not removed while it is held.

    A context manager; `release` may be called repeatedly.

    Attributes:
        folder: path of the folder with the adapter's two files.
        nbytes: size of these files.
    """

    folder: Path
    nbytes: int
    _descriptor: int

    def release(self) -> None:
        """Allow the folder to be removed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Store:
    """Adapters on this host.

    Args:
        cache: cache folder of clients.
        most_versions, most_bytes: limits of what is stored in addition to held folders.
    """

    def __init__(self, cache: Path, most_versions: int, most_bytes: int) -> None:
        self.root = cache / FOLDER
        self._most_versions = most_versions
        self._most_bytes = most_bytes

    def hold(self, key: str, fetch: Fetch) -> FolderHold:
        """An adapter's folder; fetched if it is not on this host.

        Args:
            key: key of the version.
            fetch: writes the adapter into a folder.

        Raises:
            FailedPrecondition: it cannot be written.
        """
        folder = self.root / key
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = self._lock(key)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if not self.has(key):
                self._bring(folder, fetch)
            with suppress(OSError):  # another user's
                os.utime(folder)
            return FolderHold(folder, _nbytes(folder), descriptor)
        except OSError as error:
            os.close(descriptor)
            raise self._unwritable(error) from error
        except BaseException:
            os.close(descriptor)
            raise

    def has(self, key: str) -> bool:
        """Whether a version is on this host."""
        return (self.root / key).is_dir()

    def prune(self) -> list[str]:
        """Remove versions that exceed the limits and that no process holds. Returns their keys."""
        found = sorted(self._folders(), key=lambda each: each[1])
        count, nbytes = len(found), sum(size for _, _, size in found)
        removed = []
        for folder, _, size in found:
            if count <= self._most_versions and nbytes <= self._most_bytes:
                break
            if self._remove(folder):
                removed.append(folder.name)
                count, nbytes = count - 1, nbytes - size
        self._remove_left()
        return removed

    def _folders(self) -> Iterator[tuple[Path, float, int]]:
        """Each folder, when it was last used, and its bytes."""
        with suppress(OSError):
            for each in list(self.root.iterdir()):
                with suppress(OSError):  # removed meanwhile
                    if each.is_dir() and not each.name.startswith("."):
                        yield each, each.stat().st_mtime, _nbytes(each)

    def _lock(self, key: str) -> int:
        """Descriptor of a shared lock on the file that currently has this name."""
        path = self.root / f"{key}{_LOCK}"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # removed, with the folder, between the two calls

    def _bring(self, folder: Path, fetch: Fetch) -> None:
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.root))
        try:
            fetch(new)
            with suppress(FileExistsError):
                try:
                    new.rename(folder)
                except OSError:
                    if not folder.is_dir():  # else another process was faster
                        raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _remove(self, folder: Path) -> bool:
        path = self.root / f"{folder.name}{_LOCK}"
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(descriptor, path):
                    return False
                old = Path(tempfile.mkdtemp(prefix=_OLD, dir=self.root))
                folder.rename(old / folder.name)
                shutil.rmtree(old, ignore_errors=True)
                path.unlink()
                return True
            finally:
                os.close(descriptor)
        return False  # held

    def _remove_left(self) -> None:
        with suppress(OSError):
            for each in list(self.root.iterdir()):
                if each.name.startswith((_NEW, _OLD)):
                    with suppress(OSError):
                        if time.time() - each.stat().st_mtime > _LEFT_SECONDS:
                            shutil.rmtree(each, ignore_errors=True)

    def _unwritable(self, error: OSError) -> FailedPrecondition:
        return FailedPrecondition(
            f"adapters cannot be kept in {self.root}: {error.strerror or error}",
            fix="name a folder that this user may write to in WEIGHBRIDGE_CACHE",
        )


def _nbytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir() if each.is_file())


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
