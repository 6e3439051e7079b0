"""Contents of a version: its files, its tensors in the order of their names, and where it comes from. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file of a version; digests are empty where they are not known yet."""

    name: str
    size: int
    xxh3_128: str = ""
    blake3: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor of a version; the digest is empty where it is not known yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    xxh3_128: str = ""
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a version: its files, its tensors in the order of their names, and where it comes from."""

    files: tuple[FileFacts, ...] = ()
    tensors: tuple[TensorFacts, ...] = ()
    lineage: tuple[tuple[str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


def in_order(name: str) -> list[str | int]:
    """What names of tensors are sorted by: ``layers.2`` before ``layers.10``."""
    return [int(part) if part.isdecimal() else part for part in _NUMBERS.split(name)]
