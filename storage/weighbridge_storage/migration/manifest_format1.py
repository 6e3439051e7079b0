"""Reader of manifests of format 1, as manifests of now.

The text of format 1 is one JSON object::

    {"format": 1, "model": "acme/smol", "version": 17, "step": 1700, "run": "r1", "created_ms": 1767225600000,
     "files": {"config.json": {"size": 704, "xxh3_128": "<32 hex digits>"}, ...},
     "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [576], "file": "model.safetensors", "offset": 4104,
                 "nbytes": 1152, "xxh3_128": "<32 hex digits>"}, ...},
     "lineage": {"parent": 16}}

It says neither the roots of block digests nor how many elements are non-finite: these are made from the files (`with_digests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge._core.text.shortening import shown
from weighbridge.errors import DataLoss
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName
from weighbridge_storage.versions.digests import FileDigests
from weighbridge_storage.versions.manifest import Manifest, files_from_json, tensors_from_json

FORMAT = 1
NO_ROOT = "0" * 64
"""What stands for the root of a file as long as it is not known."""


def read_manifest(data: bytes, where: str = MANIFEST_FILE) -> Manifest:
    """What a manifest of format 1 says, with `NO_ROOT` for each file and no non-finite elements.

    Args:
        data: the text of the `weighbridge.json`.
        where: what to call it in errors.

    Raises:
        DataLoss: it is malformed, contradicts itself, or has another format.
    """
    fields = strict_json.decode(data, where)
    found = fields.integer("format")
    if found != FORMAT:
        raise DataLoss(f"{where} has format {found}, and format {FORMAT} is to be migrated")
    with strict_json.malformed_as_data_loss(where):
        manifest = Manifest(
            model=ModelName.parse(fields.text("model")),
            version=fields.integer("version", 1),
            step=fields.integer("step"),
            run=fields.text("run"),
            created_ms=fields.integer("created_ms"),
            files=files_from_json(_with(fields.table("files"), {"blake3": NO_ROOT}, f"{where}, file"), where),
            tensors=tensors_from_json(
                _with(fields.table("tensors"), {"nonfinite": 0}, f"{where}, tensor"), where
            ),
            lineage=fields.table("lineage"),
        )
    fields.end()
    return manifest


def with_digests(manifest: Manifest, found: Mapping[str, FileDigests]) -> Manifest:
    """A manifest with what format 1 does not say.

    Args:
        manifest: what `read_manifest` gave.
        found: the digests of all its files, by name.

    Raises:
        DataLoss: the files are not those of the manifest; names which, and which tensors.
    """
    tensors = {name: entry for digests in found.values() for name, entry in digests.tensors.items()}
    problems = [
        *(
            f"{name} does not agree with its digest"
            for name, file in manifest.files.items()
            if (file.size, file.xxh3_128) != (found[name].entry.size, found[name].entry.xxh3_128)
        ),
        *(
            f"tensor {name} in {tensor.file} does not agree with its digest"
            for name, tensor in manifest.tensors.items()
            if tensor.xxh3_128 != tensors[name].xxh3_128
        ),
    ]
    if problems:
        raise DataLoss(f"{manifest.model}@{manifest.version} is damaged", details=problems)
    return replace(
        manifest,
        files={name: found[name].entry for name in manifest.files},
        tensors={name: tensors[name] for name in manifest.tensors},
    )


def _with(table: Mapping[str, Any], more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Entries with a field that format 1 does not have."""
    found = {}
    for name, value in table.items():
        if not isinstance(value, dict) or not value.keys().isdisjoint(more):
            raise DataLoss(f"{where} {shown(name)} is {shown(value)}, which format {FORMAT} does not have")
        found[name] = {**value, **more}
    return found
