"""A file of tests as one item of pytest-xdist: a worker imports a file when it runs it, and no file that another worker
runs.

A pytest plugin. By itself, each worker of pytest-xdist imports every file to list its tests, and xdist hands out tests.
Here a worker lists files, xdist hands out files, and the worker reports each test of a file under its own name. Options
that pick single tests (``file.py::test``, ``-k``, ``-m``, ``--lf``) work as always.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.runner import collect_one_node

from tests.support.fast import is_fast_file

_MANY_MODULES = 100
"""Imported modules that are worth a full garbage collection."""

_GARBAGE_THRESHOLDS = 5_000, 20, 50
"""Of `gc.set_threshold`: services of tests come and go, and full collections go through all of them."""


class _File(pytest.File):
    """A file of tests that is not imported yet."""

    module: pytest.Module

    @classmethod
    def of(cls, module: pytest.Module) -> _File:
        made: _File = cls.from_parent(module.parent, path=module.path, nodeid=module.nodeid)
        made.module = module
        return made

    def collect(self) -> Iterator[pytest.Item]:
        item: FileItem = FileItem.from_parent(self, name="tests")
        item._nodeid = self.nodeid
        item.module = self.module
        item.add_marker(pytest.mark.timeout(0))  # its tests have time limits
        yield item


class FileItem(pytest.Item):
    """All tests of one file, which are imported and collected when they are run."""

    module: pytest.Module

    def tests(self) -> list[pytest.Item]:
        """Import the file; its tests that the options select, in order."""
        with importing():
            collected = collect_one_node(self.module)
        self.ihook.pytest_collectreport(report=collected)
        if not collected.passed:
            return []
        found = [item for node in collected.result for item in self.session.genitems(node)]
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=found)
        return found

    def runtest(self) -> None:
        """Nothing: `pytest_runtest_protocol` runs each test by itself."""
        raise NotImplementedError

    def estimate(self) -> int:
        """Rough processor time of its tests, in units of a fast test."""
        tests = self.path.read_text("utf-8").count("\ndef test_")
        return tests if is_fast_file(self.path) else 20 * tests


@contextmanager
def importing() -> Iterator[None]:
    """Import tests without collecting garbage in between, and without torch's compiler.

    megatron-core has small functions compiled where they are defined. What tests define is compiled where they ask for
    it. What has been imported is left out of later garbage collections, which go through what tests make and not
    through all of torch.
    """
    gc.disable()
    modules = len(sys.modules)
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
        gc.enable()
        if len(sys.modules) > modules + _MANY_MODULES:
            gc.collect()  # garbage of earlier tests would stay for ever
            gc.freeze()


def pytest_configure() -> None:
    """Collect garbage less often than Python does by itself."""
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def _by_file(config: pytest.Config) -> bool:
    picks_tests = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "failedfirst"))
    return hasattr(config, "workerinput") and not picks_tests and not any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import files of tests as `importing` says."""
    with importing():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, Sequence[pytest.Collector], Sequence[pytest.Collector]]:
    """Put files in the place of modules."""
    found = yield
    if not _by_file(parent.config):
        return found
    return [_File.of(each) if isinstance(each, pytest.Module) else each for each in found]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no worker begins one when the others have ended."""
    if items and all(isinstance(item, FileItem) for item in items):
        items.sort(key=lambda item: (-item.estimate(), item.nodeid) if isinstance(item, FileItem) else (0, ""))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the tests of a file, each by the same hooks as if pytest had collected it."""
    if not isinstance(item, FileItem):
        return None
    session = item.session
    position = session.items.index(item)
    tests = item.tests()
    if not tests:  # the last test of the file before has left what it shares with this file
        session._setupstate.teardown_exact(nextitem)
    try:
        for test, following in itertools.pairwise([*tests, nextitem]):
            session.items[position] = test  # xdist reports the item that it has been given
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
    finally:
        session.items[position] = item
    return True
