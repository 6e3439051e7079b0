"""Are the drawings and the paths in the documents those of the code?"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md"]
_PATH = re.compile(r"`((?:clients|storage|service|examples|tests|protos|deploy|docs|benchmarks)/[\w./*-]+)`")
_MODULE = re.compile(r"`(weighbridge(?:_storage|_service|_demo)?(?:\.[a-z_][a-z_0-9]*)+)`")

_OTHER_NAMES = {
    "weighbridge.json",
    "weighbridge.prepare",
    "weighbridge.status",
    "weighbridge.discard",
    "weighbridge.other_writer",
    "weighbridge.base",
    "weighbridge.base_digest",
    "weighbridge.golden",
    "weighbridge.max_drift",
}
"""A file, actions of SGLang's plug-in, and keys of metadata."""


def test_the_drawings_of_imports_are_those_of_the_code() -> None:
    path = ROOT / "docs" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = draw.PAGE.read_text("utf-8")
    assert draw.drawn(page) == page, "run `make docs`"
    assert page.count("-->|") == 0
    assert page.count("flowchart TD") == len(draw.PACKAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    missing = [path for path in _PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    assert not missing, f"{page.name} names paths that do not exist: {missing}"
    links = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text) if "://" not in link]
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name} has links to nothing: {broken}"
    unknown = [name for name in _MODULE.findall(text) if name not in _OTHER_NAMES and not _importable(name)]
    assert not unknown, f"{page.name} names modules that do not exist: {unknown}"


def _importable(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = {
            "weighbridge": "clients",
            "weighbridge_storage": "storage",
            "weighbridge_service": "service",
        }
        path = ROOT / folder.get(parts[0], "examples") / Path(*parts[:length])
        if path.with_suffix(".py").exists():
            return length == len(parts) or parts[length] in path.with_suffix(".py").read_text("utf-8")
        if (path / "__init__.py").exists():
            return length == len(parts) or parts[length] in (path / "__init__.py").read_text("utf-8")
    return False
