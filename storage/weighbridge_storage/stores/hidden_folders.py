"""Hidden folders of a store in a local folder: temporary files of each writer, and locks."""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TEMP = ".tmp"
LOCKS = ".locks"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class HiddenFolders:
    """The hidden folders of a store. Its first write creates them.

    Attributes:
        locks: descriptor of the folder of locks.
        temp: descriptor of this store's own folder for temporary files.
    """

    def __init__(self, root: int) -> None:
        self.locks = _ensure_folder(root, LOCKS)
        self._release_locks = weakref.finalize(self, os.close, self.locks)
        temp_root = _ensure_folder(root, TEMP)
        try:
            self._name, self.temp = _claim_temp_folder(temp_root)
        finally:
            os.close(temp_root)
        self._release_temp = weakref.finalize(self, os.close, self.temp)

    def close(self, root: int) -> None:
        """Remove the folder for temporary files, and close the descriptors."""
        with suppress(OSError):
            os.rmdir(f"{TEMP}/{self._name}", dir_fd=root)
        self._release_temp()
        self._release_locks()


def _ensure_folder(parent: int, name: str) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, FOLDER_FLAGS, dir_fd=parent)


@contextmanager
def alone_in(temp_root: int) -> Iterator[None]:
    """Prevent other writers from seeing a sub-folder before it is locked."""
    fcntl.flock(temp_root, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(temp_root, fcntl.LOCK_UN)


def _claim_temp_folder(temp_root: int) -> tuple[str, int]:
    """Create and lock a new sub-folder, after removing the sub-folders of dead writers.

    Returns its name and descriptor.
    """
    with alone_in(temp_root):
        remove_stale(temp_root)
        own = uuid.uuid4().hex
        os.mkdir(own, dir_fd=temp_root)
        folder = os.open(own, FOLDER_FLAGS, dir_fd=temp_root)
        fcntl.flock(folder, fcntl.LOCK_EX)
        return own, folder


def remove_stale(temp_root: int) -> int:
    """Remove the sub-folders that no writer has locked. Returns the number of files in them."""
    removed = 0
    for name in os.listdir(temp_root):
        # Locked by a live writer, or removed by another process.
        with suppress(OSError):
            removed += _remove_if_stale(temp_root, name)
    return removed


def _remove_if_stale(temp_root: int, name: str) -> int:
    folder = os.open(name, FOLDER_FLAGS, dir_fd=temp_root)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left_over = os.listdir(folder)
        for file in left_over:
            os.unlink(file, dir_fd=folder)
        os.rmdir(name, dir_fd=temp_root)
    finally:
        os.close(folder)
    return len(left_over)
