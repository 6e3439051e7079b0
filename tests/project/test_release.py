"""Is a release what the changelog says, under one version, and nothing else?"""

from __future__ import annotations

import datetime as dt
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

from release import NotReleasable, changelog_of, release  # noqa: E402

import weighbridge  # noqa: E402

DAY = dt.date(2026, 12, 1)
FILES = ("CHANGELOG.md", "pyproject.toml", "clients/weighbridge/_version.py")


def git(folder: Path, *arguments: str) -> str:
    line = ["git", "-C", str(folder), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n"
    )
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "somebody")
    git(tmp_path, "config", "user.email", "somebody@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "before")
    return tmp_path


def test_what_is_unreleased_becomes_the_section_of_the_version() -> None:
    before = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-01\n\n- Old.\n"
    after, section = changelog_of(before, "0.2.0", DAY)
    assert section == "### Added\n\n- A thing."
    assert after == before.replace("## [Unreleased]", "## [Unreleased]\n\n## [0.2.0] - 2026-12-01")


def test_the_packages_version_is_the_projects() -> None:
    assert f'\nversion = "{weighbridge.__version__}"\n' in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.process
def test_a_release_is_one_commit_and_an_annotated_tag_with_its_changes(checkout: Path) -> None:
    assert release(checkout, "7.0.0", DAY) == "v7.0.0"
    assert git(checkout, "status", "--porcelain") == ""
    assert sorted(git(checkout, "show", "--name-only", "--format=", "HEAD").split()) == sorted(FILES)
    assert git(checkout, "cat-file", "-t", "v7.0.0").strip() == "tag"
    assert "### Added\n\n- A thing." in git(checkout, "tag", "--list", "--format=%(contents)", "v7.0.0")
    assert 'version = "7.0.0"' in (checkout / "pyproject.toml").read_text()
    assert 'VERSION = "7.0.0"' in (checkout / "clients/weighbridge/_version.py").read_text()


@pytest.mark.process
def test_what_cannot_be_released_leaves_everything_as_it_is(checkout: Path) -> None:
    git(checkout, "tag", "v8.0.0")
    before = git(checkout, "rev-parse", "HEAD")
    for version, why in (("0.0.1", "section"), ("0.0.2", "older"), ("8.0.0", "tag"), ("1.0", "no version")):
        with pytest.raises(NotReleasable, match=why):
            release(checkout, version, DAY)
    (checkout / "CHANGELOG.md").write_text("## [Unreleased]\n")
    with pytest.raises(NotReleasable, match="not committed"):
        release(checkout, "9.0.0", DAY)
    git(checkout, "commit", "--quiet", "--all", "--message", "nothing to tell")
    with pytest.raises(NotReleasable, match="nothing under"):
        release(checkout, "9.0.0", DAY)
    assert git(checkout, "rev-parse", "HEAD~1") == before
    assert git(checkout, "tag").split() == ["v8.0.0"]
