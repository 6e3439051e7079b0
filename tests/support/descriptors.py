"""Descriptors that this process holds."""

from __future__ import annotations

import contextlib
import gc
import os


def descriptors() -> set[tuple[int, str]]:
    """Number and target of each, those of garbage not included.

    To be compared as sets: what earlier tests have left behind may be closed by other threads at any time, and changes
    a count.
    """
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found
