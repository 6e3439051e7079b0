"""Signatures of an exported version: written next to its files, with the signed manifest, if the files are those that
were signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weighbridge._core.file_names import SIGNATURES_FOLDER
from weighbridge._core.manifest_text import MANIFEST_FILE, ManifestText
from weighbridge._core.resources import Signature


def write_signatures(folder: Path, manifest: ManifestText, signatures: Sequence[Signature]) -> bool:
    """Write a version's manifest and signatures to a folder to which the version was exported without a cast. Returns
    whether the folder has the same files as the store. With a different maximum file size it does not, and nothing is
    written.

    Raises:
        OSError: the folder cannot be written.
    """
    paths = (path for path in folder.rglob("*") if path.is_file())
    there = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    if there != {name: file.size for name, file in manifest.files.items()}:
        return False
    (folder / MANIFEST_FILE).write_bytes(manifest.text)
    write_signature_files(folder / SIGNATURES_FOLDER, signatures)
    return True


def write_signature_files(folder: Path, signatures: Sequence[Signature]) -> list[Path]:
    """Write each signature to a separate file, as ``model_signing verify`` requires. Returns the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{each.id}.sig" for each in signatures]
    for path, each in zip(paths, signatures, strict=True):
        path.write_bytes(each.content)
    return paths
