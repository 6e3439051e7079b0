"""Build steps beyond pyproject.toml: distributions record the commit that they are made from."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_VERSION = runpy.run_path(str(Path(__file__).with_name("clients") / "weighbridge" / "_version.py"))


def _record(package: Path) -> None:
    (package / _VERSION["COMMIT_FILE"]).write_text(f"{_VERSION['commit']() or ''}\n", "utf-8")


class _Built(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # which asks git each time
            _record(Path(self.build_lib, "weighbridge"))


class _Sources(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _record(Path(base_dir, "clients", "weighbridge"))


setup(cmdclass={"build_py": _Built, "sdist": _Sources})
