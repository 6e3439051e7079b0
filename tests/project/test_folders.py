"""Does each folder say what it answers, what it may import, and what lies in it?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    "clients/weighbridge", "storage/weighbridge_storage", "service/weighbridge_service", "examples/weighbridge_demo",
]  # fmt: skip
MOST_MODULES = 20
SHARED_NAMES = {"WeighbridgeCheckpointEngine"}
"""Names of classes in several modules: verl's and NeMo-RL's bases are called CheckpointEngine."""
MOST_SHARED_PRIVATE = 9
QUESTION = re.compile(r"(How|What|Which|Where|Who|Why|When|Is|Does)\b")
MODULES = sorted(
    path
    for source in SOURCES
    for path in (ROOT / source).rglob("*.py")
    if path.parent.name != "v1"  # generated
)
FOLDERS = sorted(
    found.parent
    for source in SOURCES
    for found in (ROOT / source).rglob("__init__.py")
    if found.parent.name != "v1"  # generated
)


def is_public(folder: Path) -> bool:
    """Whether users import from a folder, who read its docstring: what it may import stands in a comment then."""
    return folder.is_relative_to(ROOT / SOURCES[0]) and not any(
        part.startswith("_") for part in folder.relative_to(ROOT / SOURCES[0]).parts
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda each: str(each.relative_to(ROOT)))
def test_a_folder_names_its_modules_and_what_they_may_import(folder: Path) -> None:
    text = (folder / "__init__.py").read_text("utf-8")
    said = docstring = ast.get_docstring(ast.parse(text)) or ""
    if is_public(folder):
        assert "May import: " not in docstring, "help() of a public package is for its users"
        said = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    modules = {each.stem for each in folder.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MOST_MODULES, f"{folder} has {len(modules)} modules"
    assert "May import: " in said
    missing = [name for name in sorted(modules) if f"`{name}`" not in said]
    assert not missing, f"the docstring of {folder} does not name {missing}"
    listed = {
        name for line in re.findall(r"^- (.*?): ", said, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", line)
    }
    folders = {each.parent.name for each in folder.glob("*/__init__.py")}
    assert listed <= modules | folders, f"the docstring of {folder} names {listed - modules - folders}"


def test_a_modules_docstring_begins_with_the_noun_that_it_is() -> None:
    said = {path: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in MODULES}
    assert [str(path.relative_to(ROOT)) for path, text in said.items() if not text] == []
    assert [str(path.relative_to(ROOT)) for path, text in said.items() if QUESTION.match(text)] == []


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        if not path.is_relative_to(ROOT / "examples"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in several.items() if name[0] != "_" and name not in SHARED_NAMES} == {}
    assert len([name for name in several if name[0] == "_"]) <= MOST_SHARED_PRIVATE
