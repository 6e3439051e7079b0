"""Contents of a version: its files, its tensors sorted by name, its lineage and its provenance. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file of a version; digests are empty until they are known."""

    name: str
    size: int
    xxh3_128: str = ""
    blake3: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor of a version; the digest is empty until it is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    xxh3_128: str = ""
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a version: its files, its tensors sorted by name (see `in_order`), its lineage and its provenance."""

    files: tuple[FileFacts, ...] = ()
    tensors: tuple[TensorFacts, ...] = ()
    lineage: tuple[tuple[str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


def in_order(name: str) -> list[str | int]:
    """Sort key of a tensor's name. It sorts ``layers.2`` before ``layers.10``."""
    return [int(part) if part.isdecimal() else part for part in _NUMBERS.split(name)]
