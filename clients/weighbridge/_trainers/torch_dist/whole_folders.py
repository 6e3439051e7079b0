"""Folders that appear when they are complete. Until then their files are in a sibling folder with another name, which
is removed if anything fails.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge._formats.hf_folder import check_free, unwritable


@contextmanager
def appearing(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Make a folder that appears complete or not at all.

    Args:
        folder: a new or empty folder; missing parent folders are created.
        replace: whether to replace an existing folder, which is then removed.

    Yields:
        The temporary folder to write to. Its content is on disk before it gets its final name.

    Raises:
        InvalidArgument: something exists at the path, and ``replace`` is false.
        ResourceExhausted: the disk is full.
        FailedPrecondition: the folder cannot be written.
    """
    folder = folder.resolve()
    if not replace:
        check_free(folder)
    # another call may make the same folder at the same time, in this process or in a container with the same pid
    own = f".{folder.name}.{uuid.uuid4().hex}"
    unfinished, former = folder.with_name(f"{own}.partial"), folder.with_name(f"{own}.former")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for each in [path for path in unfinished.rglob("*") if path.is_file()]:
            _sync(each)
        _sync(unfinished)
        if folder.is_dir() and any(folder.iterdir()):
            if not replace:
                check_free(folder)
            folder.rename(former)
        unfinished.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        if former.exists() and not folder.exists():
            former.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
