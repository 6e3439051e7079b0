"""Manifest of a version: the content of its `weighbridge.json`.

It is written once, after all other files of the version.

It lists the files of the version's folder, every tensor with its location, and the origin of the version.
docs/manifest.md describes the format, with an example. Fields and parts that this release does not know are kept and
written back (``extra``, ``other_parts``). A manifest with an unknown feature in ``requires`` is rejected, and the error
names the feature.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from weighbridge._core.dtypes import DType, from_safetensors
from weighbridge._core.layouts import TensorSpec, check_spec
from weighbridge._core.text.shortening import shown
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.documents import document_digests, entry_json, strict_json
from weighbridge_storage.documents.entries import check_number, check_reasons, check_text
from weighbridge_storage.documents.names import (
    BLOCKS_SUFFIX,
    MANIFEST_FILE,
    MAX_VERSION,
    ModelName,
    check_version_file_name,
    version_prefix,
)

FORMAT = 2
FILE_FOLDERS = "file-folders"
"""The feature that names of files contain folders.

A program that does not know it would report such files as damage.
"""
FEATURES: frozenset[str] = frozenset((FILE_FOLDERS,))
"""The features that a manifest may require in this release."""
WEIGHTS = "weights"
"""Name of the part that every version has."""
MAX_METADATA = 256
"""Maximum number of entries of the metadata."""
MAX_METADATA_TEXT = 4096
"""Maximum characters of a string in the metadata; a name has at most 256."""

Metadata: TypeAlias = Mapping[str, str | int | float]

_MAX_METADATA_NAME = 256
_NOTHING: Mapping[str, Any] = MappingProxyType({})
"""All entries without unknown fields share it, because a model may have 500,000 of them."""
_XXH3 = re.compile(r"[0-9a-f]{32}")
_BLAKE3 = _SHA256 = re.compile(r"[0-9a-f]{64}")


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file.

    Attributes:
        size: in bytes.
        xxh3_128: digest of its content, as 32 hex digits.
        blake3: root of its block digests (`weighbridge_storage.versions.digests`), as 64 hex digits.
        sha256: digest of its content, as 64 hex digits; empty if it was not computed.
        extra: fields that this release does not know.
    """

    size: int
    xxh3_128: str
    blake3: str
    sha256: str = ""
    extra: Mapping[str, Any] = field(default_factory=_nothing, hash=False)

    def same_content(self, other: FileEntry) -> bool:
        """Whether both have the same bytes."""
        return (self.size, self.blake3) == (other.size, other.blake3)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, and the location of its bytes.

    Attributes:
        dtype: element type.
        shape: elements on each axis.
        file: name of the file.
        offset: position in the file of the tensor's first byte.
        nbytes: its length in bytes.
        xxh3_128: digest of these bytes, as 32 hex digits.
        nonfinite: number of its elements that are NaN or infinite.
        extra: fields that this release does not know.
    """

    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    xxh3_128: str
    nonfinite: int
    extra: Mapping[str, Any] = field(default_factory=_nothing, hash=False)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a `weighbridge.json`; an instance is always consistent.

    Attributes:
        model: the model.
        version: its number.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        created_ms: time at which the version was opened, in milliseconds since 1970 UTC.
        files: all files of the folder except the manifest and the block digests.
        tensors: all tensors by name.
        lineage: origin of the version: ``parent``, the number of the version before, and fields of later releases.
        metadata: the user's metadata: strings, finite numbers and booleans by printable names.
        held: reasons why the version was held when the manifest was written; the version's entry contains the current
            reasons.
        provenance: record of how, and by which identity, the version was pushed; see `provenance_of`.
        requires: features that a reader must know to read the version correctly.
        weights_extra: the fields of the weights that this release does not know.
        other_parts: the parts that this release does not know, by name.
        extra: the other fields that it does not know.

    Raises:
        InvalidArgument: a name, a string or a digest is malformed; a tensor's length does not match its shape, the
            tensor is outside its file or overlaps another tensor, or its file is not listed; or the metadata exceeds a
            limit.
    """

    model: ModelName
    version: int
    step: int
    run: str
    created_ms: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    lineage: Mapping[str, Any] = field(default_factory=_nothing, hash=False)
    metadata: Metadata = field(default_factory=_nothing, hash=False)
    held: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=_nothing, hash=False)
    requires: tuple[str, ...] = ()
    weights_extra: Mapping[str, Any] = field(default_factory=_nothing, hash=False)
    other_parts: Mapping[str, Any] = field(default_factory=_nothing, hash=False)
    extra: Mapping[str, Any] = field(default_factory=_nothing, hash=False)

    def __post_init__(self) -> None:
        version_prefix(self.model, self.version)
        check_text("run", self.run)
        check_number("the size of all files", sum(file.size for file in self.files.values()))
        for name, file in self.files.items():
            if check_version_file_name(name) == MANIFEST_FILE or name.endswith(BLOCKS_SUFFIX):
                raise InvalidArgument(f"{name} is listed, which is not one of the version's files")
            _check_digest(f"file {name}", file.xxh3_128, _XXH3)
            _check_digest(f"file {name}", file.blake3, _BLAKE3)
            if file.sha256:
                _check_digest(f"file {name}", file.sha256, _SHA256)
        for name, tensor in self.tensors.items():
            self._check_tensor(name, tensor)
        for name in self.weight_files:
            check_version_file_name(name + BLOCKS_SUFFIX)
        self._check_disjoint()
        parent = self.lineage.get("parent", 1)
        if type(parent) is not int or not 1 <= parent <= MAX_VERSION:
            raise InvalidArgument(f"the parent is {shown(parent)}, which is not a version number")
        _check_metadata(self.metadata)
        check_reasons(self.held)

    @property
    def weight_files(self) -> frozenset[str]:
        """Names of the files that contain tensors. Each has an object with block digests next to it."""
        return frozenset(tensor.file for tensor in self.tensors.values())

    @property
    def nonfinite_elements(self) -> int:
        """Elements of all tensors that are NaN or infinite."""
        return sum(tensor.nonfinite for tensor in self.tensors.values())

    def to_json(self) -> bytes:
        """The manifest as the text of `weighbridge.json`. The text ends with its digest.

        Raises:
            InvalidArgument: an unknown field that was kept contains a value that JSON cannot express.
        """
        weights = {
            **self.weights_extra,
            "files": entry_json.named_to_json(self.files),
            "tensors": tensors_to_json(self.tensors),
        }
        return document_digests.encode(
            {
                **self.extra,
                "format": FORMAT,
                "requires": list(self.requires),
                "model": str(self.model),
                "version": self.version,
                "step": self.step,
                "run": self.run,
                "created_ms": self.created_ms,
                "parts": {**self.other_parts, WEIGHTS: weights},
                "lineage": dict(self.lineage),
                "metadata": dict(self.metadata),
                **({"held": list(self.held)} if self.held else {}),
                **({"provenance": dict(self.provenance)} if self.provenance else {}),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str = MANIFEST_FILE) -> Manifest:
        """Read the text of a `weighbridge.json`; ``where`` names it in errors.

        Raises:
            DataLoss: it is damaged, malformed or contradictory.
            FailedPrecondition: it has another format, or requires a feature that is unknown here; the message states
                the fix.
        """
        fields = document_digests.decode(data, where, FORMAT)
        requires = fields.required(FEATURES)
        parts = strict_json.Fields(fields.table("parts"), f"{where}, parts")
        weights = strict_json.Fields(parts.table(WEIGHTS), f"{where}, parts, {WEIGHTS}")
        with strict_json.malformed_as_data_loss(where):
            return Manifest(
                model=ModelName.parse(fields.text("model")),
                version=fields.integer("version", 1),
                step=fields.integer("step"),
                run=fields.text("run"),
                created_ms=fields.integer("created_ms"),
                files=entry_json.named_from_json(FileEntry, weights.table("files"), f"{where}, file"),
                tensors=tensors_from_json(weights.table("tensors"), where),
                lineage=fields.table("lineage"),
                metadata=fields.table("metadata"),
                held=fields.texts("held") if "held" in fields else (),
                provenance=fields.table("provenance") if "provenance" in fields else {},
                requires=requires,
                weights_extra=weights.rest(),
                other_parts=parts.rest(),
                extra=fields.rest(),
            )

    def _check_tensor(self, name: str, tensor: TensorEntry) -> None:
        check_spec(TensorSpec(name, tensor.dtype, tensor.shape))
        _check_digest(f"tensor {name}", tensor.xxh3_128, _XXH3)
        elements = math.prod(tensor.shape)
        expected = elements * tensor.dtype.itemsize
        if tensor.nbytes != expected:
            raise InvalidArgument(f"tensor {name} has {tensor.nbytes} bytes, and its shape needs {expected}")
        file = self.files.get(tensor.file)
        if file is None:
            raise InvalidArgument(f"tensor {name} is in {shown(tensor.file)}, which is not listed")
        if tensor.offset < 0 or tensor.offset + tensor.nbytes > file.size:
            raise InvalidArgument(
                f"tensor {name} ends at byte {tensor.offset + tensor.nbytes} of {tensor.file}, "
                f"which has {file.size} bytes"
            )
        if not 0 <= tensor.nonfinite <= elements:
            raise InvalidArgument(f"tensor {name} has {tensor.nonfinite} non-finite elements of {elements}")

    def _check_disjoint(self) -> None:
        places = sorted((t.file, t.offset, t.offset + t.nbytes, name) for name, t in self.tensors.items() if t.nbytes)
        for (file, _, end, name), (next_file, start, _, next_name) in itertools.pairwise(places):
            if file == next_file and start < end:
                raise InvalidArgument(f"tensors {name} and {next_name} share bytes of {file}")


def tensors_to_json(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Entries of tensors as JSON values."""
    return {
        name: {
            **tensor.extra,
            "dtype": tensor.dtype.name,
            "shape": tensor.shape,
            "file": tensor.file,
            "offset": tensor.offset,
            "nbytes": tensor.nbytes,
            "xxh3_128": tensor.xxh3_128,
            "nonfinite": tensor.nonfinite,
        }
        for name, tensor in tensors.items()
    }


def tensors_from_json(table: Mapping[str, Any], where: str) -> dict[str, TensorEntry]:
    """Read the JSON object that `tensors_to_json` returned; ``where`` names it in errors.

    Raises DataLoss, InvalidArgument.
    """
    return {name: _read_tensor(value, f"{where}, tensor {shown(name)}") for name, value in table.items()}


def _check_digest(what: str, digest: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(digest):
        raise InvalidArgument(f"{what} has the digest {shown(digest)}, which does not match {pattern.pattern}")


def _check_metadata(metadata: Metadata) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidArgument(f"the metadata has {len(metadata)} entries, more than {MAX_METADATA}")
    for name, value in metadata.items():
        if not name.isprintable() or not 0 < len(name) <= _MAX_METADATA_NAME:
            raise InvalidArgument(
                f"{shown(name)} is not a valid name of metadata",
                fix=f"use 1 to {_MAX_METADATA_NAME} printable characters",
            )
        if isinstance(value, str):
            allowed = len(value) <= MAX_METADATA_TEXT
        elif type(value) is int:
            allowed = abs(value) <= strict_json.MAX_INTEGER
        else:
            allowed = type(value) is bool or (type(value) is float and math.isfinite(value))
        if not allowed:
            raise InvalidArgument(
                f"metadata {shown(name)} is {shown(value)}",
                fix=(
                    f"use a text of up to {MAX_METADATA_TEXT} characters, a finite number, an "
                    "integer of 64 bits, or a boolean"
                ),
            )


def _read_tensor(value: object, where: str) -> TensorEntry:
    fields = strict_json.Fields(value, where)
    shape = fields.array("shape")
    if any(type(n) is not int for n in shape):
        raise DataLoss(f"{where} has the shape {shown(shape)}")
    return TensorEntry(
        dtype=from_safetensors(fields.text("dtype")),
        shape=tuple(shape),
        file=fields.text("file"),
        offset=fields.integer("offset"),
        nbytes=fields.integer("nbytes"),
        xxh3_128=fields.text("xxh3_128"),
        nonfinite=fields.integer("nonfinite"),
        extra=fields.rest() or _NOTHING,
    )
