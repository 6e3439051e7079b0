"""Drawings of docs/architecture.md that follow from the imports: ``python docs/draw.py`` writes them anew
(``make docs``).

A drawing stands between ``<!-- imports of PACKAGE -->`` and ``<!-- end -->``. Its boxes are the folders of the package
and the modules that lie beside them; an arrow stands for imports that no longer way implies.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
PACKAGES = ("weighbridge", "weighbridge_storage", "weighbridge_service")
_BLOCK = re.compile(r"(<!-- imports of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LEFT_OUT = {
    "weighbridge.__main__",
    "weighbridge._version",
    "weighbridge.v1",
}  # imported by nearly everything, or by nothing

Graph = Mapping[str, set[str]]


def drawn(text: str) -> str:
    """A page with its drawings as the imports are now."""
    graph = grimp.build_graph(*PACKAGES)
    return _BLOCK.sub(lambda block: block[1] + _mermaid(_folders(graph, block[2])) + block[3], text)


def _folders(graph: grimp.ImportGraph, package: str) -> Graph:
    """Imports between the folders and modules of a package."""
    names = {name for name in graph.find_children(package) if name not in _LEFT_OUT}
    return {
        name: {
            other
            for other in names - {name}
            if graph.find_shortest_chain(name, other, as_packages=True) is not None
            and graph.direct_import_exists(importer=name, imported=other, as_packages=True)
        }
        for name in sorted(names)
    }


def _mermaid(graph: Graph) -> str:
    lines = ["```mermaid", "flowchart TD"]
    short = {name: name.rpartition(".")[2] for name in graph}
    lines += [f"    {short[name]}[{short[name]}]" for name in graph]
    for name, others in graph.items():
        implied = set[str]().union(*(_reached(graph, other) for other in others))
        lines += [f"    {short[name]} --> {short[other]}" for other in sorted(others - implied)]
    return "\n".join([*lines, "```", ""])


def _reached(graph: Graph, name: str) -> set[str]:
    """All that a folder imports, directly or not."""
    found: set[str] = set()
    left = list(graph[name])
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += graph[each]
    return found


if __name__ == "__main__":
    before = PAGE.read_text("utf-8")
    after = drawn(before)
    PAGE.write_text(after, "utf-8")
    sys.stdout.write(f"{PAGE.name} {'is as it was' if after == before else 'has changed'}\n")
