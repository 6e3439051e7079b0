"""Names of a version's files: paths within its folder that are safe as parts of a path, of a URL and of an object
key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

MOST_LEVELS = 8
"""Maximum number of components of a name: the folders that contain the file, and the file's own name."""
MOST_CHARACTERS = 256
"""Maximum length of a name, including slashes."""
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
"""Names of the files in which transformers describes the weights of a model, and peft those of an adapter."""
SIGNATURES_FOLDER = "signatures"
"""Folder in an exported version that contains its signatures.

A version does not have files in a folder with this name.
"""
ALLOWED = (
    "1 to 128 letters, digits, '-', '_' or '.', not starting with '-' or '.', in at most "
    f"{MOST_LEVELS - 1} folders and with at most "
    f"{MOST_CHARACTERS} characters in all"
)

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_adapter(files: Collection[str]) -> bool:
    """Whether these names of files other than the weights belong to a peft adapter and not to a model."""
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
    """Yield the folders that contain a file of this name, the innermost first."""
    while name := name.rpartition("/")[0]:
        yield name


def folders_of(names: Iterable[str]) -> frozenset[str]:
    """Return the folders, at every level, that contain files with these names."""
    return frozenset(folder for name in names for folder in folders_above(name))
