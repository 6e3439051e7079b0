"""Names of a version's files: paths within its folder that are safe as parts of a path, of a URL and of an object key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

MOST_LEVELS = 8
"""Components of a name: the folders that a file lies in, and the file's own name."""
MOST_CHARACTERS = 256
"""Of a name, slashes included."""
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
"""The file that describes the weights of a model, and that of an adapter, as transformers and peft call them."""
SIGNATURES_FOLDER = "signatures"
"""Folder of an exported version in which its signatures lie: no file of a version is in one of this name."""
ALLOWED = (
    f"1 to 128 letters, digits, '-', '_' or '.', not starting with '-' or '.', in at most {MOST_LEVELS - 1} folders and with at most "
    f"{MOST_CHARACTERS} characters in all"
)

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_adapter(files: Collection[str]) -> bool:
    """Whether the files besides the weights, by their names, are those of an adapter of peft and not of a model."""
    return ADAPTER_CONFIG in files and CONFIG not in files


def is_component(name: object) -> bool:
    """Whether a file or a folder of a version may have this name."""
    return isinstance(name, str) and _COMPONENT.fullmatch(name) is not None


def is_file_name(name: object) -> bool:
    """Whether a version may have a file of this name, such as ``config.json`` or ``1_Pooling/config.json``."""
    if not isinstance(name, str) or len(name) > MOST_CHARACTERS:
        return False
    components = name.split("/")
    return len(components) <= MOST_LEVELS and all(map(is_component, components))


def folders_above(name: str) -> Iterator[str]:
    """The folders that a file of this name lies in, the innermost first."""
    while name := name.rpartition("/")[0]:
        yield name


def folders_of(names: Iterable[str]) -> frozenset[str]:
    """The folders that files with these names lie in, at every level."""
    return frozenset(folder for name in names for folder in folders_above(name))
