"""Regular files of a folder.

Links are followed only within the folder; files elsewhere, devices and pipes are not opened.

A downloaded folder may contain links to any file of this machine, and imported files are readable by every client with
read access. In a cache of the Hugging Face Hub, each file of a snapshot is a link into the ``blobs`` of the same
repository (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): these are part of the folder.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

from weighbridge.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, WeighbridgeError

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_MOST_OPEN = 1 << 20


def reach_of(folder: Path) -> tuple[Path, ...]:
    """The folders that may contain files of a folder: itself, and the cache's blobs if it is a snapshot of a cache or
    is inside one.
    """
    root = folder.resolve()
    snapshots = next((parent for parent in root.parents if parent.name == _SNAPSHOTS), None)
    return (root,) if snapshots is None else (root, snapshots.with_name(_BLOBS))


def fault_of(path: Path, folder: Path) -> WeighbridgeError | None:
    """Error for a file of a folder that must not be opened; None if it may be.

    Links are followed, and nothing is opened.

    Args:
        path: path of the file.
        folder: folder that must contain it.

    Returns:
        NotFound: the file does not exist.
        DataLoss: it is not a regular file.
        InvalidArgument: it is a link out of the folder.
    """
    try:
        there = path.resolve(strict=True)
        regular = stat.S_ISREG(there.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            return NotFound(f"{path} is a dangling link", fix="download all files of the folder again")
        return NotFound(f"{path} does not exist", fix="download or save all files of the folder again")
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) or error.errno == errno.ELOOP:  # which of them depends on Python's release
            return DataLoss(f"{path} is a link to itself", fix="put the file itself in its place")
        return InvalidArgument(f"{path} cannot be read: {error.strerror}", fix="let this user read it")
    if not regular:
        return DataLoss(f"{path} is not a regular file", fix="put the file in its place, or remove it")
    if not any(there.is_relative_to(root) for root in reach_of(folder)):
        return InvalidArgument(
            f"{path} is a link to {there}, outside its folder",
            fix="put the file itself in its place, or remove the link",
        )
    return None


def open_regular(path: Path, folder: Path) -> int:
    """A descriptor of a file of a folder, open for reading.

    Raises:
        NotFound: the file does not exist.
        DataLoss: it is not a regular file.
        InvalidArgument: it is a link out of the folder, or may not be read.
        ResourceExhausted: this process has too many files open.
    """
    fault = fault_of(path, folder)
    if fault is not None:
        raise fault
    try:
        fd = _open(path.resolve())
    except FileNotFoundError as error:
        raise NotFound(f"{path} was removed before it was opened") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceExhausted(
                f"{path} cannot be opened: {error.strerror}", fix="raise the limit of this process: ulimit -n"
            ) from error
        raise InvalidArgument(
            f"{path} cannot be read: {error.strerror}", fix="let this user read it, or remove it"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DataLoss(f"{path} is not a regular file", fix="put the file in its place, or remove it")
    return fd


def _open(path: Path) -> int:
    # if the file was meanwhile replaced by a link or a pipe, the link is not followed and the open does not block
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE or not _may_open_more():
            raise
    return os.open(path, flags)


def _may_open_more() -> bool:
    """Raise this process's limit of open files to its maximum: a checkpoint of a thousand ranks has more than the usual
    1024. Returns whether the limit has grown.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else _MOST_OPEN
    if soft == resource.RLIM_INFINITY or soft >= most:
        return False
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return True
    return False


def read_regular(path: Path, folder: Path) -> bytes:
    """The content of a file of a folder. Raises as `open_regular`."""
    with os.fdopen(open_regular(path, folder), "rb") as file:
        return file.read()
