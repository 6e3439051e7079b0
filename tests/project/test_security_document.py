"""Does SECURITY.md name tests that exist?"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def named() -> list[tuple[str, Path]]:
    """The tests that the table of promises names; a file name without a folder is in the folder of the previous
    file.
    """
    found = []
    for promise, tests in re.findall(r"^\| (.+?) \| (.+) \|$", TEXT.partition("## What is held")[2], re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([\w/.]+)`", tests):
            path = ROOT / name if "/" in name else folder / name
            folder = path.parent
            found.append((promise, path))
    return found


def test_every_promise_names_tests_and_all_of_them_exist() -> None:
    rows = [line for line in TEXT.partition("## What is held")[2].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert {promise for promise, _ in named()} == {row.split(" | ")[0].removeprefix("| ") for row in rows}
    for promise, path in named():
        tests = [path] if path.is_file() else sorted(path.glob("**/test_*.py"))
        assert tests, f"{promise}: {path}"
        assert all("\ndef test_" in test.read_text() for test in tests), path


def test_make_targets_that_it_names_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", TEXT)) <= targets
