"""Choice of fast tests: those of files that start neither services nor ranks, and do not unpack whole stores.

A file is judged by what it imports. In a fast file, a test is not fast if it is marked `process` or `slow`, is on S3,
or asks for a fixture of a file that is not fast.
"""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HEAVY = {
    "benchmarks",
    "tests.support.areal_jobs",
    "tests.support.family_maps",
    "tests.support.killable_service",
    "tests.support.lane_client",
    "tests.support.many_ranks",
    "tests.support.megatron_ranks",
    "tests.support.small_stores",
    "tests.support.services",
    "tests.support.transformers_client",
    "tests.support.trl_environment",
    "tests.support.verl_jobs",
    "tests.support.vllm_environment",
    "tests.support.writer_faults",
}
"""Modules that start services or ranks, unpack whole stores, or make the maps of all families.

A file that imports one is not fast.
"""


@functools.cache
def is_fast_file(path: Path) -> bool:
    """Whether a file imports nothing `HEAVY`."""
    return not _imported(path) & HEAVY


def is_fast(test: pytest.Item) -> bool:
    """Whether a test of a fast file is fast itself."""
    parameters = getattr(getattr(test, "callspec", None), "params", {})
    on_s3 = "seaweed" in getattr(test, "fixturenames", ()) or parameters.get("location") == "s3"
    if on_s3 or any(test.get_closest_marker(name) for name in ("process", "slow")):
        return False
    definitions = test._fixtureinfo.name2fixturedefs.values() if hasattr(test, "_fixtureinfo") else ()
    files = {Path(inspect.getfile(inspect.unwrap(each.func))) for defined in definitions for each in defined}
    return all(is_fast_file(file) for file in files if file.is_relative_to(TESTS))


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            names.add(node.module.partition(".")[0])
    return names
