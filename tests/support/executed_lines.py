"""Work of a call as the number of lines of Python that it executes, which other work on the machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def executed_lines(call: Callable[[], object]) -> int:
    """Number of lines of Python that a call executes in this thread; each round of a loop or comprehension counts."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
