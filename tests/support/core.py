"""``--core``: only the tests of the core, by the import contract that names its folders."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PACKAGES = {
    "weighbridge": "sdk",
    "weighbridge_storage": "storage",
    "weighbridge_service": "service",
}


@functools.cache
def core_folders() -> frozenset[Path]:
    """The folders of tests that mirror the packages of the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    [core] = [each for each in contracts if each["name"].startswith("The core imports no other house")]
    return frozenset(map(_tests_of, core["source_modules"]))


def _tests_of(module: str) -> Path:
    package, *inner = module.split(".")
    return ROOT / "tests" / _PACKAGES[package] / Path(*(name.removeprefix("_") for name in inner))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--core``."""
    parser.addoption("--core", action="store_true", help="only tests of the core: see docs/architecture.md")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files of other houses, before they are imported."""
    if not config.getoption("core") or not collection_path.name.startswith("test_"):
        return None
    return None if core_folders() & set(collection_path.parents) else True
