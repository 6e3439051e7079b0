"""What does a version consist of?

Its `weighbridge.json` lists every other file of the version's folder, every tensor with the bytes that hold it, and where
the version comes from::

    {"format": 1, "model": "acme/smol", "version": 17, "step": 1700, "run": "r1", "created_ms": 1767225600000,
     "files": {"config.json": {"size": 704, "xxh3_128": "<32 hex digits>", "blake3": "<64 hex digits>"}, ...},
     "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [576], "file": "model.safetensors", "offset": 4104,
                 "nbytes": 1152, "xxh3_128": "<32 hex digits>", "nonfinite": 0}, ...},
     "lineage": {"parent": 16}}

BLAKE3 and non-finite elements: `weighbridge_storage.digests`. Others are XXH3-128 of the bytes with seed 0, as its reference implementation prints them: most significant byte first. An
offset counts from the start of the file, header included.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weighbridge.dtypes import DType, from_safetensors
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.layouts import TensorSpec, check_spec
from weighbridge_storage import strict_json
from weighbridge_storage.names import MANIFEST_FILE, ModelName, check_version_file_name, shown, version_prefix

FORMAT = 1

_XXH3 = re.compile(r"[0-9a-f]{32}")
_BLAKE3 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file.

    Attributes:
        size: in bytes.
        xxh3_128: digest of its content, as 32 hex digits.
        blake3: root of its block digests (`weighbridge_storage.digests`), as 64 hex digits.
    """

    size: int
    xxh3_128: str
    blake3: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, and the bytes that hold it.

    Attributes:
        dtype: element type.
        shape: elements on each axis.
        file: name of the file.
        offset: byte of the file where the tensor starts.
        nbytes: its length in bytes.
        xxh3_128: digest of these bytes, as 32 hex digits.
        nonfinite: how many of its elements are NaN or infinite.
    """

    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    xxh3_128: str
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a `weighbridge.json`; an instance is always consistent.

    Attributes:
        model: whose version it is.
        version: its number.
        step: the trainer's step.
        run: the trainer's name for its run; may be empty.
        created_ms: when the version was opened, in milliseconds since 1970 UTC.
        files: all files of the folder but the manifest.
        tensors: all tensors by name.
        lineage: where the version comes from, e.g. ``parent``; texts and integers by printable names.

    Raises:
        InvalidArgument: a name or a digest is malformed, a tensor's length does not follow from its shape, lies
            outside its file or on another tensor's bytes, or its file is not listed.
    """

    model: ModelName
    version: int
    step: int
    run: str
    created_ms: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    lineage: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        version_prefix(self.model, self.version)
        for name, file in self.files.items():
            if check_version_file_name(name) == MANIFEST_FILE:
                raise InvalidArgument(f"the manifest lists itself, {name}")
            _check_digest(f"file {name}", file.xxh3_128, _XXH3)
            _check_digest(f"file {name}", file.blake3, _BLAKE3)
        for name, tensor in self.tensors.items():
            self._check_tensor(name, tensor)
        self._check_disjoint()
        for name, value in self.lineage.items():
            if not name.isprintable() or type(value) not in (str, int):
                raise InvalidArgument(f"lineage has {shown(name)} = {shown(value)}, no text and no integer")

    def to_json(self) -> bytes:
        """The manifest as the text of `weighbridge.json`."""
        return strict_json.encode(
            {
                "format": FORMAT,
                "model": str(self.model),
                "version": self.version,
                "step": self.step,
                "run": self.run,
                "created_ms": self.created_ms,
                "files": files_to_json(self.files),
                "tensors": tensors_to_json(self.tensors),
                "lineage": dict(self.lineage),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str = MANIFEST_FILE) -> Manifest:
        """Read the text of a `weighbridge.json`; ``where`` names it in errors.

        Raises:
            DataLoss: it is malformed, contradicts itself, or has a format that this version does not know.
        """
        fields = strict_json.decode(data, where)
        found = fields.integer("format")
        if found != FORMAT:
            raise DataLoss(
                f"{where} has format {found}, and only {FORMAT} is known here", fix="use a newer Weighbridge"
            )
        try:
            manifest = Manifest(
                model=ModelName.parse(fields.text("model")),
                version=fields.integer("version", 1),
                step=fields.integer("step"),
                run=fields.text("run"),
                created_ms=fields.integer("created_ms"),
                files=files_from_json(fields.table("files"), where),
                tensors=tensors_from_json(fields.table("tensors"), where),
                lineage=fields.table("lineage"),
            )
        except InvalidArgument as error:
            raise DataLoss(f"{where} is malformed: {error.message}") from error
        fields.end()
        return manifest

    def _check_tensor(self, name: str, tensor: TensorEntry) -> None:
        check_spec(TensorSpec(name, tensor.dtype, tensor.shape))
        _check_digest(f"tensor {name}", tensor.xxh3_128, _XXH3)
        expected = math.prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.nbytes != expected:
            raise InvalidArgument(f"tensor {name} has {tensor.nbytes} bytes, and its shape needs {expected}")
        file = self.files.get(tensor.file)
        if file is None:
            raise InvalidArgument(f"tensor {name} lies in {shown(tensor.file)}, which is not listed")
        if tensor.offset < 0 or tensor.offset + tensor.nbytes > file.size:
            raise InvalidArgument(
                f"tensor {name} ends at byte {tensor.offset + tensor.nbytes} of {tensor.file}, "
                f"which has {file.size} bytes"
            )
        elements = math.prod(tensor.shape)
        if not 0 <= tensor.nonfinite <= elements:
            raise InvalidArgument(f"tensor {name} has {tensor.nonfinite} non-finite elements of {elements}")

    def _check_disjoint(self) -> None:
        places = sorted(
            (t.file, t.offset, t.offset + t.nbytes, name) for name, t in self.tensors.items() if t.nbytes
        )
        for (file, _, end, name), (next_file, start, _, next_name) in itertools.pairwise(places):
            if file == next_file and start < end:
                raise InvalidArgument(f"tensors {name} and {next_name} share bytes of {file}")


def files_to_json(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Entries of files as JSON values."""
    return {
        name: {"size": file.size, "xxh3_128": file.xxh3_128, "blake3": file.blake3}
        for name, file in files.items()
    }


def files_from_json(table: Mapping[str, Any], where: str) -> dict[str, FileEntry]:
    """What `files_to_json` gave; ``where`` names it in errors. Raises DataLoss."""
    return {name: _read_file(value, f"{where}, file {shown(name)}") for name, value in table.items()}


def tensors_to_json(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Entries of tensors as JSON values."""
    return {
        name: {
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
    """What `tensors_to_json` gave; ``where`` names it in errors. Raises DataLoss, InvalidArgument."""
    return {name: _read_tensor(value, f"{where}, tensor {shown(name)}") for name, value in table.items()}


def _check_digest(what: str, digest: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(digest):
        raise InvalidArgument(
            f"{what} has the digest {shown(digest)}, which does not match {pattern.pattern}"
        )


def _read_file(value: object, where: str) -> FileEntry:
    fields = strict_json.Fields(value, where)
    entry = FileEntry(
        size=fields.integer("size"), xxh3_128=fields.text("xxh3_128"), blake3=fields.text("blake3")
    )
    fields.end()
    return entry


def _read_tensor(value: object, where: str) -> TensorEntry:
    fields = strict_json.Fields(value, where)
    shape = fields.array("shape")
    if any(type(n) is not int for n in shape):
        raise DataLoss(f"{where} has the shape {shown(shape)}")
    entry = TensorEntry(
        dtype=from_safetensors(fields.text("dtype")),
        shape=tuple(shape),
        file=fields.text("file"),
        offset=fields.integer("offset"),
        nbytes=fields.integer("nbytes"),
        xxh3_128=fields.text("xxh3_128"),
        nonfinite=fields.integer("nonfinite"),
    )
    fields.end()
    return entry
