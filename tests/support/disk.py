"""A disk whose flushes cost nothing, for tests."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


@contextmanager
def disk_without_wait() -> Iterator[None]:
    """Flushes of files and folders return at once: they last for milliseconds each, and show only after a loss of
    power.

    That files are flushed, and which, is for tests to see that watch the calls; processes that are started as programs
    flush.
    """
    really = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def flush(name: str, file: FileDescriptorLike) -> None:
        mode = os.fstat(file if isinstance(file, int) else file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            really[name](file)

    with pytest.MonkeyPatch.context() as patch:
        for name in really:
            patch.setattr(os, name, functools.partial(flush, name))
        yield
