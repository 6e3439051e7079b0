"""Releases of Weighbridge beside the checkout's own: wheels of git's refs, each in an environment over the dependencies
of this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_KEPT = ROOT / "build" / "releases"
"""Wheels, in a folder for each commit."""
ROLES = Path(__file__).with_name("rolling_roles.py")


@dataclass(frozen=True)
class Release:
    """An installed release.

    Attributes:
        name: the ref.
        python: interpreter of its environment.
    """

    name: str
    python: Path

    def command(self, *arguments: str) -> list[str]:
        """The command line of this release's ``weighbridge``."""
        return [str(self.python), "-P", "-m", "weighbridge", *arguments]

    def role(self, *arguments: str) -> list[str]:
        """The command line of one of `rolling_roles` with this release's SDK."""
        return [str(self.python), "-P", str(ROLES), *arguments]


def installed(ref: str, folder: Path) -> Release:
    """A release, installed from its wheel.

    Args:
        ref: a tag, or any commit.
        folder: a new one for its environment.

    Raises:
        CalledProcessError: there is no such ref, or it cannot be built.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in _dependencies()))
    _pip("--python", str(python), "install", "--no-deps", "--no-compile", "--force-reinstall", str(wheel(ref)))
    return Release(ref, python)


def _dependencies() -> list[str]:
    """The folders of this environment's packages.

    Python does not read path files there: the checkout's editable install stays out.
    """
    return [path for path in sys.path if Path(path).name == "site-packages"]


def wheel(ref: str) -> Path:
    """The wheel of a ref, built once for each commit and kept."""
    commit = _git("rev-parse", f"{ref}^{{commit}}")
    folder = _KEPT / commit
    if not (kept := sorted(folder.glob("*.whl"))):
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as made:
            source = Path(made) / "source"
            source.mkdir()
            with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
                subprocess.run(["tar", "-x"], cwd=source, stdin=archive.stdout, check=True)
            _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", f"{made}/wheel", str(source))
            Path(made, "wheel").rename(folder)
        kept = sorted(folder.glob("*.whl"))
    return kept[0]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PIP_NO_INPUT": "1"})
