"""Maker of a release: ``python deploy/release.py 0.2.0`` (``make release VERSION=0.2.0``) writes it down, commits it,
and tags it. It publishes nothing.

What CHANGELOG.md has as unreleased becomes the version's section, with the day; pyproject.toml and the SDK get the
version; the annotated tag ``v0.2.0`` has the section as its message.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_UNRELEASED = "## [Unreleased]"
_SECTION = re.compile(r"^## \[Unreleased\]\n(?P<text>.*?)(?=^## \[|\Z)", re.DOTALL | re.MULTILINE)
_VERSIONS = {
    "pyproject.toml": re.compile(r'^version = "(?P<version>[^"]+)"$', re.MULTILINE),
    "clients/weighbridge/_version.py": re.compile(r'^VERSION = "(?P<version>[^"]+)"$', re.MULTILINE),
}
"""Files that say the version, and where."""
_RELEASE = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


class NotReleasable(Exception):
    """Why there is no release of it."""


def changelog_of(text: str, version: str, day: dt.date) -> tuple[str, str]:
    """A changelog with its unreleased changes as a version's, and that section's text.

    Raises:
        NotReleasable: there are none, or the version has a section already.
    """
    if f"## [{version}]" in text:
        raise NotReleasable(f"CHANGELOG.md has a section of {version} already")
    found = _SECTION.search(text)
    section = "" if found is None else found["text"].strip()
    if found is None or not section:
        raise NotReleasable(f"CHANGELOG.md has nothing under {_UNRELEASED}")
    made = f"{_UNRELEASED}\n\n## [{version}] - {day.isoformat()}\n\n{section}\n"
    rest = text[found.end() :]
    return text[: found.start()] + made + (f"\n{rest}" if rest else ""), section


def version_set(text: str, place: re.Pattern[str], version: str) -> str:
    """A file's text with another version.

    Raises:
        NotReleasable: the version is not newer than the one there, nor the same.
    """
    found = place.search(text)
    if found is None:
        raise NotReleasable(f"no line like {place.pattern}")
    if _numbers(version) < _numbers(found["version"]):
        raise NotReleasable(f"{version} is older than {found['version']}")
    return text[: found.start("version")] + version + text[found.end("version") :]


def release(root: Path, version: str, day: dt.date) -> str:
    """Write a release down in a checkout, commit it and tag it.

    Returns:
        The tag.

    Raises:
        NotReleasable: the version is none, its tag exists, files have changes that are not committed, or the files do
            not allow it.
    """
    _numbers(version)
    tag = f"v{version}"
    if _git(root, "tag", "--list", tag):
        raise NotReleasable(f"there is a tag {tag}")
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise NotReleasable("files have changes that are not committed")
    log = root / "CHANGELOG.md"
    changelog, section = changelog_of(log.read_text("utf-8"), version, day)
    texts = {log: changelog}
    for name, place in _VERSIONS.items():
        texts[root / name] = version_set((root / name).read_text("utf-8"), place, version)
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    _git(root, "commit", "--quiet", "--message", f"Release {version}", *(str(path) for path in texts))
    # headings begin with what git takes for comments
    _git(
        root,
        "tag",
        "--annotate",
        "--cleanup=verbatim",
        "--message",
        f"Weighbridge {version}\n\n{section}\n",
        tag,
    )
    return tag


def _numbers(version: str) -> tuple[int, ...]:
    found = _RELEASE.fullmatch(version)
    if found is None:
        raise NotReleasable(f"{version!r} is no version such as 0.2.0")
    return tuple(int(number) for number in found.groups())


def _git(root: Path, *arguments: str) -> str:
    line = ["git", "-C", str(root), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Make the release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    asked = parser.parse_args()
    try:
        tag = release(ROOT, asked.version, dt.datetime.now(dt.UTC).date())
    except NotReleasable as error:
        sys.stderr.write(f"no release: {error}\n")
        return 1
    sys.stdout.write(f"{tag} is committed and tagged here; nothing was published: git push --follow-tags\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
