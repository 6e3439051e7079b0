"""``--cheap``: without costly tests, those that took more than `COSTLY_SECONDS` of a processor when ``--record-costly``
wrote their list.

A pytest plugin. `make test` leaves costly tests out, and `make test-all` runs them too. A test that is not in the list
counts as cheap until the list is written again. With both options, tests are added to the list: the first of the tests
that are left pays for what a file's tests share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.costs import costs_of

COSTLY_SECONDS = 0.55
LIST = Path(__file__).parents[1] / "costly.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cheap`` and ``--record-costly``."""
    group = parser.getgroup("costs")
    group.addoption("--cheap", action="store_true", help=f"leave out the tests that {LIST.name} lists")
    group.addoption("--record-costly", action="store_true", help=f"write {LIST.name} from what this run costs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out costly tests, if asked to. What `--changed` has chosen runs whatever it costs."""
    if config.getoption("cheap") and not config.getoption("changed", None):
        listed = frozenset(LIST.read_text("utf-8").split("\n"))
        costly = [item for item in items if item.nodeid in listed]
        config.hook.pytest_deselected(items=costly)
        items[:] = [item for item in items if item.nodeid not in listed]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the list of costly tests, if asked to."""
    if config.getoption("record_costly"):
        before = LIST.read_text("utf-8").split() if config.getoption("cheap") else ()
        LIST.write_text(listed(costs_of(terminalreporter), before), "utf-8")


def listed(costs: Mapping[str, float], before: Iterable[str] = ()) -> str:
    """The list of the costly ones among tests whose processor seconds are given, and of those that were listed
    before.
    """
    costly = {test for test, seconds in costs.items() if seconds > COSTLY_SECONDS}
    return "".join(f"{test}\n" for test in sorted(costly.union(before)))
