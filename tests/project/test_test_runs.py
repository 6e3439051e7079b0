"""Runs of the tests: does each test run once, wherever it runs, is what a change reaches found, and does a long run go
on where it stopped?
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from tests import long
from tests.support import costly
from tests.support.alone import alone
from tests.support.cells import CELLS, Cells, left_out
from tests.support.changed import ROOT, Tree, reached
from tests.support.costs import processor_seconds
from tests.support.forked import forking
from tests.support.rounds import ROUNDS

ROW = re.compile(r"^\| `([A-Z_0-9]+)` \| ([\d,]+) \| ([\d,]+) \| (.+) \|$", re.MULTILINE)
FILES = {
    "test_long.py": (
        "import pytest\n@pytest.mark.parametrize('i', range(3))\ndef test_a(i):\n    assert i != "
        "1\ndef test_b(tmp_path):\n    pass\n"
    ),
    "test_skipped.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
    "test_short.py": (
        "import pytest\n@pytest.fixture\ndef broken():\n    raise OSError\ndef test_c(broken):\n    pass\n"
    ),
    "test_unimportable.py": "import nothing_of_this_name\n",
}


def test_each_test_of_each_file_runs_once_and_is_reported_by_its_own_name(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-rA",
        "-p",
        "tests.support.file_items",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = sorted(re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:\[1\] )?(\S+)", ran.stdout, re.MULTILINE))
    assert said == [
        ("ERROR", "test_short.py::test_c"),
        ("ERROR", "test_unimportable.py"),
        ("FAILED", "test_long.py::test_a[1]"),
        ("PASSED", "test_long.py::test_a[0]"),
        ("PASSED", "test_long.py::test_a[2]"),
        ("PASSED", "test_long.py::test_b"),
        ("SKIPPED", "test_skipped.py:2:"),
    ]
    assert ran.returncode == 1


@alone
def _fails(reason: str) -> None:
    raise AssertionError(reason)


@alone
def _ends() -> None:
    os._exit(3)


def test_what_fails_in_a_process_of_its_own_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="AssertionError: too many descriptors"):
        _fails(reason="too many descriptors")
    with pytest.raises(pytest.fail.Exception, match="has ended with 3"):
        _ends()


def _compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_processor_time_of_processes_counts_while_they_run_and_once_they_have_ended() -> None:
    forking()
    before = processor_seconds()
    process = forking().Process(target=_compute, args=(0.3,))
    process.start()
    process.join()
    assert processor_seconds() - before >= 0.25


def test_cheap_runs_leave_out_what_the_list_names_and_nothing_else(
    tmp_path: Path,
) -> None:
    assert costly.listed({"a::b": 2.0, "a::a[1]": 0.9, "a::c": 0.1}) == "a::a[1]\na::b\n"
    assert costly.listed({"a::b": 2.0, "a::c": 0.1}, ["a::a"]) == "a::a\na::b\n"
    (tmp_path / "test_x.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "costly.txt").write_text("test_x.py::test_b\n")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.support import costly\n"
        "costly.LIST = Path(__file__).parent / 'costly.txt'\n"
        "pytest_plugins = ('tests.support.costs', 'tests.support.costly')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ran(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-rA", *arguments]
        said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
        return re.findall(r"^PASSED (\S+)", said, re.MULTILINE)

    assert ran("--cheap") == ["test_x.py::test_a"]
    assert ran() == ran("--record-costly") == ["test_x.py::test_a", "test_x.py::test_b"]
    assert (tmp_path / "costly.txt").read_text() == ""


def test_a_file_of_which_no_test_is_run_leaves_the_next_one_alone(tmp_path: Path) -> None:
    for name in ("a/test_a.py", "a/test_b.py", "c/test_c.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text("def test_it(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [each for each in items if not each.nodeid.endswith('test_b.py::test_it')]\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-rA"]
    command += ["-p", "tests.support.file_items"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.findall(r"^PASSED (\S+)", ran.stdout, re.MULTILINE) == [
        "a/test_a.py::test_it",
        "c/test_c.py::test_it",
    ]


def test_the_documents_name_the_rounds_of_each_test() -> None:
    rows = ROW.findall((ROOT / "docs" / "testing.md").read_text("utf-8"))
    assert rows == [(each.variable, f"{each.usual:,}", f"{each.long:,}", each.unit) for each in ROUNDS]


def test_what_has_rounds_is_read_by_the_tests_that_its_part_selects() -> None:
    for each in ROUNDS:
        folder = ROOT / each.tests.split()[0]
        files = [folder] if folder.is_file() else (ROOT / "tests").rglob("*.py")
        assert any(f'rounds("{each.variable}")' in file.read_text("utf-8") for file in files), each.variable


def test_cells_that_are_left_out_are_of_tests_that_exist() -> None:
    for cells in CELLS:
        file, _, name = cells.test.partition("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text("utf-8"), cells.test


def test_cases_that_are_not_named_are_left_to_the_long_run() -> None:
    cells = [
        Cells("sdk/test_a.py::test_a", ("local", "s3-rows]"), "b"),
        Cells("sdk/test_a.py::test_never", (), "c"),
        Cells("sdk/test_b.py", (), "d"),
    ]
    names = ["a[local-rows]", "a[s3-rows]", "a[s3-rows2]", "a[s3]", "never", "never[1]", "b[s3]"]
    out = [name for name in names if left_out(f"tests/sdk/test_a.py::test_{name}", cells)]
    assert out == ["a[s3-rows2]", "a[s3]", "never", "never[1]"]
    cases = ["a", "a[s3]", "b[s3-1]", "b[local-s3]"]
    assert [name for name in cases if left_out(f"tests/sdk/test_b.py::test_{name}", cells)] == [
        "a[s3]",
        "b[s3-1]",
    ]


def tree(*edges: str) -> Tree:
    """A checkout: ``importer imported`` in each edge, as files from the root."""
    pairs = [tuple(PurePosixPath(name) for name in edge.split()) for edge in edges]
    files = {str(file): file for pair in pairs for file in pair}
    importers = {
        name: frozenset(str(importer) for importer, imported in pairs if str(imported) == name) for name in files
    }
    tests = {file for file in files.values() if file.name.startswith("test_")}
    return Tree(
        {_module(k): frozenset(map(_module, v)) for k, v in importers.items()},
        {_module(k): f for k, f in files.items()},
        dict.fromkeys(tests, "asks for page.html"),
    )


def _module(file: str) -> str:
    for source in ("clients/", "storage/", "service/", "examples/"):
        file = file.removeprefix(source)
    return file.removesuffix(".py").replace("/", ".")


SERVICE = "service/weighbridge_service"
CHECKOUT = tree(
    f"tests/service/push/test_direct.py {SERVICE}/push/session.py",
    f"{SERVICE}/push/intake.py {SERVICE}/push/session.py",
    f"{SERVICE}/api/handlers.py {SERVICE}/push/intake.py",
    f"{SERVICE}/api/far.py {SERVICE}/api/handlers.py",
    f"{SERVICE}/service.py {SERVICE}/push/session.py",
    f"tests/service/api/test_near.py {SERVICE}/api/handlers.py",
    f"tests/service/api/test_far.py {SERVICE}/api/far.py",
    "tests/support/fakes.py service/weighbridge_service/push/intake.py",
    "tests/support/more_fakes.py tests/support/fakes.py",
    "tests/sdk/test_faked.py tests/support/more_fakes.py",
    f"tests/end_to_end/test_all.py {SERVICE}/service.py",
    f"tests/service/push/test_beside.py {SERVICE}/plan/cuts.py",
    *(f"tests/storage/test_{i}.py storage/weighbridge_storage/kernel.py" for i in range(9)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (f"{SERVICE}/push/session.py", ("service/push/test_direct service/push/test_beside service/api/test_near "
                                       "sdk/test_faked")),
        (f"{SERVICE}/plan/cuts.py", ("service/push/test_beside service/api/test_near service/api/test_far "
                                    "service/push/test_direct")),
        (f"{SERVICE}/service.py", ("end_to_end/test_all service/push/test_beside service/api/test_near "
                                  "service/api/test_far service/push/test_direct")),
        ("tests/service/push/test_direct.py", "service/push/test_direct"),
        ("tests/support/fakes.py", "sdk/test_faked"),
        ("tests/service/conftest.py", ("service/push/test_direct service/push/test_beside service/api/test_near "
                                      "service/api/test_far")),
    ],
)  # fmt: skip
def test_a_change_reaches_what_imports_it_nearby_and_the_tests_of_its_folder(changed: str, tests: str) -> None:
    found = reached([PurePosixPath(changed)], CHECKOUT)
    assert found.everything is None
    assert set(found.files) == {PurePosixPath(f"tests/{name}.py") for name in tests.split()}
    assert set(found.files.values()) == {changed}


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "requirements/dev.txt", "protos/weighbridge/v1/model.proto", "clients/weighbridge/v1/a_pb2.py", "storage/weighbridge_storage/kernel.py", "page.html"]
)  # fmt: skip
def test_a_change_to_what_most_tests_stand_on_reaches_all(changed: str) -> None:
    assert reached([PurePosixPath(changed)], CHECKOUT).everything == changed


def test_a_long_run_goes_on_where_it_stopped_until_the_checkout_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, broken = tmp_path / "ran", tmp_path / "broken"
    parts = [
        long.Part("first", ("sh", "-c", f"echo first $WEIGHBRIDGE_SEED >> {log}")),
        long.Part("second", ("sh", "-c", f"echo second $ROUNDS >> {log}; test ! -e {broken}"), {"ROUNDS": "50"}),
        long.Part("third", ("sh", "-c", f"echo third >> {log}")),
    ]

    def ran() -> list[str]:
        lines = log.read_text().splitlines()
        log.unlink()
        return lines

    broken.touch()
    assert long.run(parts, tmp_path, "a", 5) == 1
    assert ran() == ["first 5", "second 50", "third"]
    assert "3 parts: 1 failed, 0 not run" in capsys.readouterr().out
    broken.unlink()
    assert long.run(parts, tmp_path, "a", 6) == 0
    assert ran() == ["second 50"], "only what had failed"
    assert "seed 5" in capsys.readouterr().out, "of the run in which a part has passed"
    assert long.run(parts[:1], tmp_path, "b", 7) == 0
    assert ran() == ["first 7"], "the checkout is another"
