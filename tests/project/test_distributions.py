"""Do distributions say which commit they are made from, and is a wheel refused that is not what a release needs?"""

from __future__ import annotations

import html.parser
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

from distributions import wheel_faults, write_index  # noqa: E402
from trial import faults_of_version  # noqa: E402

NAME = "weighbridge-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
FILES = {"weighbridge/__init__.py": 1, "weighbridge/_memory/_native.abi3.so": 0}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    line = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def version_file(tmp_path: Path) -> Path:
    """The module of the version, where it is in a checkout, without git."""
    place = tmp_path / "clients/weighbridge/_version.py"
    place.parent.mkdir(parents=True)
    return Path(shutil.copy(ROOT / "clients/weighbridge/_version.py", place))


def commit_of(version_file: Path) -> Any:
    return runpy.run_path(str(version_file))["commit"]()


@pytest.mark.process
def test_a_checkout_says_its_commit_and_whether_it_has_changes(version_file: Path, tmp_path: Path) -> None:
    assert commit_of(version_file) is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    git(tmp_path, "tag", "--annotate", "--message", "one", "v7")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit_of(version_file) == short
    version_file.write_text(version_file.read_text() + "\n")
    assert commit_of(version_file) == f"{short} and changes"


def test_a_distribution_says_the_commit_that_it_records(version_file: Path) -> None:
    version_file.with_name("_commit.txt").write_text("1a2b3c4d\n")
    assert commit_of(version_file) == "1a2b3c4d"
    version_file.with_name("_commit.txt").write_text("\n")
    assert commit_of(version_file) is None


def test_a_wheel_is_refused_without_the_extension_with_other_files_and_for_one_machine() -> None:
    assert wheel_faults(NAME, FILES, FILES) == []
    (without,) = wheel_faults(NAME, {"weighbridge/__init__.py": 1}, {"weighbridge/__init__.py": 1})
    assert "not compiled" in without
    (lacking,) = wheel_faults(NAME, FILES, {**FILES, "weighbridge/page.html": 2})
    assert "lacks weighbridge/page.html" in lacking
    (more,) = wheel_faults(NAME, {**FILES, "tests/test_a.py": 2}, FILES)
    assert "has tests/test_a.py" in more
    (other,) = wheel_faults(NAME, {**FILES, "weighbridge/__init__.py": 3}, FILES)
    assert "weighbridge/__init__.py" in other
    (local,) = wheel_faults(NAME.replace("manylinux_2_28", "linux"), FILES, FILES)
    assert "this machine alone" in local


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("weighbridge 0.1.0 (commit 1a2b3c4d)\n", True),
        ("weighbridge 0.1.1 (commit 1a2b3c4d)\n", False),
        ("weighbridge 0.1.0 (commit 1a2b3c4e)\n", False),
        ("weighbridge 0.1.0 (commit 1a2b3c4d and changes)\n", False),
        ("weighbridge 0.1.0 (commit unknown)\n", False),
    ],
)
def test_a_release_says_its_version_and_the_tags_commit(said: str, is_right: bool) -> None:
    assert (faults_of_version(said, "0.1.0", f"1a2b3c4d{'0' * 32}") == []) is is_right


def test_an_index_links_to_each_distribution_with_its_digest(tmp_path: Path) -> None:
    wheel = tmp_path / NAME
    wheel.write_bytes(b"abc")
    write_index(tmp_path / "simple", "weighbridge", [wheel])
    links: list[str] = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: links.append(dict(attrs)["href"] or "") if tag == "a" else None  # type: ignore[method-assign]
    parser.feed((tmp_path / "simple/weighbridge/index.html").read_text())
    # sha256sum of "abc": FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert links == [f"{NAME}#sha256={digest}"]
    assert (tmp_path / "simple/weighbridge" / NAME).read_bytes() == b"abc"


def test_the_wheel_of_the_workflow_is_the_one_of_the_limited_api() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    tag = project["tool"]["distutils"]["bdist_wheel"]["py-limited-api"]
    assert project["tool"]["cibuildwheel"]["build"].startswith(f"{tag}-manylinux")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_what_they_use_and_have_no_more_rights_than_each_job_needs(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert set(job.get("needs", ())) <= set(workflow["jobs"]), name
        for step in job["steps"]:
            if "uses" in step:
                assert step["uses"].partition("@")[2].startswith(("v", "release/v")), step["uses"]
