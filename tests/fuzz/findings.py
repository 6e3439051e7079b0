"""Findings: inputs that break a parser or cost too much, distinguished by their fault, made small, and kept as
files.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.judge import Verdict

FOUND = Path(__file__).parent / "found"
"""Earlier findings, by target."""
_SECONDS = 10.0


def kept(target: str, folder: Path = FOUND) -> list[Path]:
    """The findings of a target that are kept."""
    return sorted(path for path in (folder / target).glob("*") if path.is_file())


def save(folder: Path, target: str, verdict: Verdict, data: bytes) -> Path:
    """Save an input and the text of its verdict, under a name that shows the fault."""
    place = folder / target
    place.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", verdict.key)[:60] + "-" + hashlib.sha256(data).hexdigest()[:8]
    (place / name).write_bytes(data)
    if verdict.said:
        (folder / f"{target}-{name}.txt").write_text(verdict.said, "utf-8")
    return place / name


def made_small(data: bytes, fails: Callable[[bytes], bool], seconds: float = _SECONDS) -> bytes:
    """An input from which nothing can be left out without its fault, as far as that is found in time.

    Parts are left out, half of it first, then smaller ones (Zeller, Hildebrandt: Simplifying and Isolating
    Failure-Inducing Input, 2002).

    Args:
        data: the input.
        fails: whether another one shows the same fault.
        seconds: most that it may take.
    """
    deadline = time.monotonic() + seconds
    size = len(data) // 2
    while size:
        start = 0
        while start < len(data):
            if time.monotonic() > deadline:
                return data
            without = data[:start] + data[start + size :]
            if fails(without):
                data = without
            else:
                start += size
        size = min(size // 2, len(data) // 2)
    return data
