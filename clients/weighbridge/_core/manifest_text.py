"""Manifest of a version as a client reads it: its version, its origin, and the files that it lists. docs/manifest.md
describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weighbridge._core.file_names import is_file_name
from weighbridge.errors import DataLoss

MANIFEST_FILE = "weighbridge.json"
BLOCKS_SUFFIX = ".blake3"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file that a manifest lists.

    Attributes:
        size: size in bytes.
        sha256: SHA-256 of the content, as 64 hex digits; empty if the manifest does not contain it.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ManifestText:
    """A manifest.

    Attributes:
        text: text of the manifest as it is stored.
        model: ``namespace/name``.
        number: number of the version.
        step: the trainer's step.
        run: the trainer's name for its run.
        parent: number of the previous version; 0 if this is the first.
        files: all files of the version by name, except the manifest itself and block digests.
        weights: names of the files that contain tensors.
        tensors: XXH3-128 of each tensor's bytes by name, as 32 hex digits, for the tensors for which the manifest
            contains it.
        provenance: who pushed the version, and how.
        metadata: metadata that was pushed with the version.
    """

    text: bytes = field(repr=False)
    model: str
    number: int
    step: int
    run: str
    parent: int
    files: Mapping[str, ListedFile]
    weights: frozenset[str]
    tensors: Mapping[str, str] = field(repr=False)
    provenance: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The digest at the end of the text, as 64 hex digits; empty if the text does not contain one."""
        return str(json.loads(self.text).get("digest", ""))

    @staticmethod
    def read(text: bytes) -> ManifestText:
        """Read a manifest from its text. Raises DataLoss if the text is not a manifest."""
        try:
            found = json.loads(text, object_pairs_hook=_unique)
            weights = found["parts"]["weights"]
            files = {
                _name(name): ListedFile(int(file["size"]), str(file.get("sha256", "")))
                for name, file in weights["files"].items()
            }
            manifest = ManifestText(
                text=text,
                model=str(found["model"]),
                number=int(found["version"]),
                step=int(found["step"]),
                run=str(found["run"]),
                parent=int(found["lineage"].get("parent", 0)),
                files=files,
                weights=frozenset(tensor["file"] for tensor in weights["tensors"].values()),
                tensors={
                    name: str(tensor["xxh3_128"]) for name, tensor in weights["tensors"].items() if "xxh3_128" in tensor
                },
                provenance=dict(found.get("provenance", {})),
                metadata=dict(found.get("metadata", {})),
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataLoss(f"this is not the manifest of a version: {error!r}"[:300]) from error
        if not manifest.weights <= files.keys():
            raise DataLoss(f"the manifest of {manifest.title} does not list all files that hold tensors")
        return manifest

    @property
    def title(self) -> str:
        """``namespace/name@number``."""
        return f"{self.model}@{self.number}"

    @property
    def sha256(self) -> str:
        """SHA-256 of the text, as 64 hex digits."""
        return hashlib.sha256(self.text).hexdigest()


def _name(name: str) -> str:
    if not is_file_name(name) or name == MANIFEST_FILE:
        raise ValueError(f"{name[:100]!r} is not a valid name for a file of a version")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found
