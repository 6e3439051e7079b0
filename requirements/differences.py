"""Packages that an environment has in other versions than constraints.txt, one a line.

``.venv-newest/bin/python requirements/differences.py`` looks at the environment of the Python that runs it. It needs
the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from lock import entries, normal

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def differences(installed: Mapping[str, str], pins: str) -> Iterator[str]:
    """The packages whose versions differ, in the order of their names.

    Args:
        installed: versions by the names of the packages.
        pins: the text of a constraints file.

    Yields:
        ``name pinned -> installed``, or ``name installed, without a pin``. A local part of a version (``+cpu``) is of
        no matter.
    """
    pinned = {name: version for name, version, _ in entries(pins)}
    found = {normal(name): version for name, version in installed.items()}
    for name in sorted(found.keys() - {"weighbridge"}):
        if name not in pinned:
            yield f"{name} {found[name]}, without a pin"
        elif found[name].partition("+")[0] != pinned[name]:
            yield f"{name} {pinned[name]} -> {found[name]}"


if __name__ == "__main__":
    here = {each.name: each.version for each in metadata.distributions()}
    print(*differences(here, CONSTRAINTS.read_text("utf-8")), sep="\n")
