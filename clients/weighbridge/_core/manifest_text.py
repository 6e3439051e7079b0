"""Manifest of a version as a client reads it: whose it is, where it comes from, and which files it lists. docs/manifest.md has the format."""

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
        size: in bytes.
        sha256: of its content, as 64 hex digits; empty if the manifest does not say.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ManifestText:
    """A manifest.

    Attributes:
        text: as it is stored.
        model: ``namespace/name``.
        number: of the version.
        step: the trainer's step.
        run: the trainer's name for its run.
        parent: number of the version before; 0 if there was none.
        files: by name, all files of the version but the manifest itself and block digests.
        weights: names of those that hold tensors.
        tensors: XXH3-128 of each tensor's bytes by its name, as 32 hex digits; of those for which the manifest has it.
        provenance: who pushed the version, and how.
        metadata: what was pushed with it.
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
        """The digest with which its text ends, as 64 hex digits; empty if there is none."""
        return str(json.loads(self.text).get("digest", ""))

    @staticmethod
    def read(text: bytes) -> ManifestText:
        """The manifest of this text. Raises DataLoss if it is none."""
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
                    name: str(tensor["xxh3_128"])
                    for name, tensor in weights["tensors"].items()
                    if "xxh3_128" in tensor
                },
                provenance=dict(found.get("provenance", {})),
                metadata=dict(found.get("metadata", {})),
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataLoss(f"this is no manifest of a version: {error!r}"[:300]) from error
        if not manifest.weights <= files.keys():
            raise DataLoss(f"the manifest of {manifest.title} does not list all files that hold tensors")
        return manifest

    @property
    def title(self) -> str:
        """``namespace/name@number``."""
        return f"{self.model}@{self.number}"

    @property
    def sha256(self) -> str:
        """Of its text, as 64 hex digits."""
        return hashlib.sha256(self.text).hexdigest()


def _name(name: str) -> str:
    if not is_file_name(name) or name == MANIFEST_FILE:
        raise ValueError(f"{name[:100]!r} cannot name a file of a version")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found
