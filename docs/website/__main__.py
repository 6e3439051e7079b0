"""Maker of the site: ``python -m docs.website [--pages-only]``, from a checkout's root."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from docs.website import commands, contract, http_api, pages, python_api

PAGES = pages.ROOT / "build" / "pages"


def stage(to: Path) -> None:
    """Write all pages, as Zensical reads them, and what they load."""
    shutil.rmtree(to, ignore_errors=True)
    pages.stage(to)
    reference = to / "reference"
    reference.mkdir()
    for name, page in python_api.PAGES.items():
        (reference / f"{name}.md").write_text(page.text(), "utf-8")
    (reference / "commands.md").write_text(commands.page(), "utf-8")
    (reference / "grpc.md").write_text(contract.page(), "utf-8")
    (reference / "http.md").write_text(http_api.page(http_api.document()), "utf-8")
    assets = to / "assets"
    assets.mkdir(exist_ok=True)
    # Mermaid's own script, as mermaidx brings it: no page asks another host for it
    shutil.copyfile(str(files("mermaidx") / "assets" / "mermaid.js"), assets / "mermaid.js")


def main() -> int:
    """Make the site; its exit code is 1 if anything was to be warned of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages-only", action="store_true", help="write build/pages, and make no site of them")
    asked = parser.parse_args()
    stage(PAGES)
    if asked.pages_only:
        return 0
    line = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    made = subprocess.run(
        line, cwd=pages.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    sys.stdout.write(made.stdout)
    # --strict does not count what is wrong with docstrings
    return made.returncode or int("griffe:" in made.stdout)


if __name__ == "__main__":
    sys.exit(main())
