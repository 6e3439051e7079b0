"""Small Megatron jobs in tests: the demo's launcher, whose server of processes has here imported what tests need
besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.forked import PRELOAD
from weighbridge_demo import ranks
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_demo.ranks import RankError

__all__ = ["RankError", "run_ranks"]


def run_ranks(parallel: Parallel, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """As `weighbridge_demo.ranks.run_ranks`."""
    return ranks.run_ranks(parallel, fn, *args, timeout=timeout, preload=PRELOAD)
