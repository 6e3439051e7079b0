"""Name of a checkpoint, such as ``out/iter_0000100``, as trainers choose it."""

from __future__ import annotations

import os
import re
from pathlib import PurePath


def step_named(name: str | os.PathLike[str]) -> int | None:
    """The training step that a checkpoint's name says: the number with which it ends, or None."""
    number = re.search(r"\d+$", PurePath(name).name)
    return None if number is None else int(number[0])
