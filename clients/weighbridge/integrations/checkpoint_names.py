"""Name of a checkpoint, such as ``out/iter_0000100``, as trainers choose it."""

from __future__ import annotations

import os
import re
from pathlib import PurePath


def step_named(name: str | os.PathLike[str]) -> int | None:
    """The training step in a checkpoint's name: the number at its end, or None."""
    number = re.search(r"\d+$", PurePath(name).name)
    return None if number is None else int(number[0])
