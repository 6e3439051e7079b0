"""Cache folder of clients: recordings, and the files of models that an engine reads from a folder.

Clients can recreate its files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from weighbridge._formats.hf_folder import write_side_files
from weighbridge.errors import FailedPrecondition

CACHE_VARIABLE = "WEIGHBRIDGE_CACHE"
_FIX = f"set {CACHE_VARIABLE} to a folder that this user can write, or give the user a writable home folder (HOME)"


def cache_folder() -> Path:
    """Cache folder of clients: ``WEIGHBRIDGE_CACHE``, or ``weighbridge`` in the user's cache folder.

    Raises:
        FailedPrecondition: no folder is configured, and the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get(CACHE_VARIABLE) or f"{base}/weighbridge").expanduser()
    except RuntimeError as error:
        raise FailedPrecondition("there is no cache folder: this user has no home folder", fix=_FIX) from error


def folder_of(kind: str, files: Mapping[str, bytes]) -> Path:
    """A folder with exactly these files; equal files give the same folder. Other processes may create it concurrently.

    Args:
        kind: kind of the files, as a part of the folder's path.
        files: their contents by name.

    Raises:
        FailedPrecondition: the folder cannot be written.
        InvalidArgument: a name could lead out of it.
    """
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = cache_folder() / kind / digest.hexdigest()[:32]
    try:
        if not folder.is_dir():
            _write(folder, files)
    except OSError as error:
        raise FailedPrecondition(
            f"config and tokenizer of a model cannot be stored in {folder.parent}: {error.strerror or error}",
            fix=_FIX,
        ) from error
    return folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write_side_files(new, files)
        new.rename(folder)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        if not folder.is_dir():  # else another process was faster
            raise
