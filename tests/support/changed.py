"""Tests that a change reaches, by the import graph: ``make test ARGS=--changed``.

A pytest plugin around one pure function, `reached`. A test file is reached by a changed module if it imports it through
few others, or lies in the folder that mirrors the module's. Modules that put the whole together (`ASSEMBLIES`) end the
way: what starts a service imports all of it, and would be reached by any change. For what is behind them there are the
tests of its own folder, and the smoke promises, which always run. A change that reaches most of the tests, as one of
`weighbridge.errors` does, runs all of them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "clients/weighbridge": "sdk",
    "storage/weighbridge_storage": "storage",
    "service/weighbridge_service": "service",
    "examples/weighbridge_demo": "demo",
    "clients/native": "sdk/memory",
}
"""Folders of packages, and the folder below ``tests`` that mirrors each."""
ASSEMBLIES = frozenset(
    {
        "weighbridge",
        "weighbridge._cli",
        "weighbridge_storage.opening",
        "weighbridge_service.api.http.app",
        "weighbridge_service.families",
        "weighbridge_service.core",
        "weighbridge_service.service",
        "weighbridge_service.server",
        "tests.conftest",
        "tests.support.services",
    }
)
"""Modules that import what they put together: to import one of them is to use the whole, and no part in particular."""
EVERYTHING = (
    "pyproject.toml",
    "constraints.txt",
    "requirements/",
    "protos/",
    "clients/weighbridge/v1/",
    "tests/conftest.py",
)
"""Files and folders that every test stands on."""
MOST_IMPORTS = 2
"""Imports between a changed module and a test, those of ``tests.support`` apart."""
MOST_PART = 0.5
"""A change that reaches a larger part of the test files runs all."""


@dataclass(frozen=True)
class Tree:
    """The import graph of a checkout, and its test files.

    Attributes:
        importers: for each module, the modules that import it.
        files: for each module, its file, from the root of the checkout.
        texts: for each test file, its text.
    """

    importers: Mapping[str, frozenset[str]]
    files: Mapping[str, PurePosixPath]
    texts: Mapping[PurePosixPath, str] = field(repr=False)


@dataclass(frozen=True)
class Reached:
    """Test files that a change reaches.

    Attributes:
        files: for each, the changed file that reaches it.
        everything: the changed file that reaches all of them, if there is one.
    """

    files: Mapping[PurePosixPath, str]
    everything: str | None = None


def reached(changed: Iterable[PurePosixPath], tree: Tree) -> Reached:
    """The test files that changed files reach."""
    modules = {file: module for module, file in tree.files.items()}
    found: dict[PurePosixPath, str] = {}
    for file in sorted(changed):
        if str(file).startswith(EVERYTHING):
            return Reached({}, str(file))
        if file in modules:
            tests = _importing(modules[file], tree)
        else:
            tests = {test for test, text in tree.texts.items() if file.name in text}
        for test in {*tests, *_of_its_folder(file, tree)}:
            found.setdefault(test, str(file))
        if len(found) > MOST_PART * len(tree.texts):
            return Reached({}, str(file))
    return Reached(found)


def _importing(module: str, tree: Tree) -> set[PurePosixPath]:
    """The test files that import a module through at most `MOST_IMPORTS` others."""
    distances = {module: 0}
    waiting = [module]
    for each in waiting:
        if each in ASSEMBLIES and each != module:
            continue
        for importer in tree.importers.get(each, ()):
            distance = distances[each] + (not importer.startswith("tests."))
            if distance <= MOST_IMPORTS and distance < distances.get(importer, MOST_IMPORTS + 1):
                distances[importer] = distance
                waiting.append(importer)
    return {tree.files[each] for each in distances if each in tree.files and tree.files[each] in tree.texts}


def _of_its_folder(file: PurePosixPath, tree: Tree) -> set[PurePosixPath]:
    """The test files in the folder that mirrors a file's, or in the nearest one above it that exists."""
    folder = _mirrored(file)
    while folder is not None and folder != PurePosixPath("tests"):
        below = {test for test in tree.texts if folder in test.parents}
        if below:
            return below
        folder = folder.parent
    return set()


def _mirrored(file: PurePosixPath) -> PurePosixPath | None:
    for source, mirror in SOURCES.items():
        if PurePosixPath(source) in file.parents:
            inner = file.relative_to(source).parent.parts
            return PurePosixPath("tests", mirror, *(part.lstrip("_") for part in inner))
    if file.parts[0] == "tests":
        if file.name == "conftest.py":
            return file.parent
        return None
    return PurePosixPath("tests/project")


def read_tree(root: Path) -> Tree:
    """The import graph of a checkout."""
    import grimp

    packages = {Path(source).name: source for source in SOURCES if (root / source / "__init__.py").exists()}
    graph = grimp.build_graph(*packages, "tests", "benchmarks", exclude_type_checking_imports=True, cache_dir=None)
    files = {}
    for module in graph.modules:
        package, *rest = module.split(".")
        base = PurePosixPath(packages.get(package, package), *rest)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (root / file).exists():
                files[module] = file
    importers = {each: frozenset(graph.find_modules_that_directly_import(each)) for each in graph.modules}
    texts = {
        file: (root / file).read_text("utf-8")
        for file in files.values()
        if file.parts[0] == "tests" and file.name.startswith("test_")
    }
    return Tree(importers, files, texts)


def changed_files(root: Path, since: str) -> list[PurePosixPath]:
    """Files that differ from a commit, those that git does not know yet included."""
    known = _git(root, "diff", "--name-only", since)
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return [PurePosixPath(line) for line in (*known, *new)]


def _base(root: Path) -> str:
    """The commit that a change starts from: where the branch left ``main``, or, on ``main``, the last commit if nothing
    is changed since.
    """
    for main in ("origin/main", "main"):
        try:
            [base] = _git(root, "merge-base", "HEAD", main)
        except subprocess.CalledProcessError:
            continue
        if [base] != _git(root, "rev-parse", "HEAD") or changed_files(root, base):
            return base
    return "HEAD~1"


def _git(root: Path, *arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


_REACHED = pytest.StashKey[Reached]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--changed``."""
    parser.getgroup("changed").addoption(
        "--changed",
        nargs="?",
        const="",
        metavar="COMMIT",
        help=(
            "run the tests that the changes since COMMIT reach, and the smoke promises; by "
            "default since the branch left main"
        ),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find what is reached, before anything is imported."""
    since = config.getoption("changed")
    if since is not None:
        changed = changed_files(ROOT, since or _base(ROOT))
        config.stash[_REACHED] = reached(changed, read_tree(ROOT))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell what is run, and why."""
    found = config.stash.get(_REACHED, None)
    if found is None:
        return []
    if found.everything:
        return [f"changed: {found.everything} reaches everything"]
    reasons = sorted(set(found.files.values()))
    return [f"changed: {len(reasons)} files reach {len(found.files)} files of tests; the smoke promises besides"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that nothing reaches and that have no smoke promise, before they import what they need."""
    found = config.stash.get(_REACHED, None)
    if found is None or found.everything or not collection_path.name.startswith("test_"):
        return None
    if _is_reached(collection_path, found) or "pytest.mark.smoke" in collection_path.read_text("utf-8"):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the smoke promises of files that the change does not reach."""
    found = config.stash.get(_REACHED, None)
    if found is None or found.everything:
        return

    def runs(item: pytest.Item) -> bool:
        whole_file = not isinstance(item, pytest.Function)
        return whole_file or _is_reached(item.path, found) or item.get_closest_marker("smoke") is not None

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]


def _is_reached(path: Path, found: Reached) -> bool:
    return PurePosixPath(path.relative_to(ROOT)) in found.files
