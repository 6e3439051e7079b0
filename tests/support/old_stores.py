"""Stores of before: as the release before heads of format 3 and manifests of format 2 wrote them."""

from __future__ import annotations

import copy
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

from weighbridge_storage.stores.objects import ObjectStore

ARCHIVE = Path(__file__).parents[1] / "data/store_format2.tar.xz"
"""What data/write_store_of_before.py wrote with the code of before."""
MODEL = "acme/smol"
DURABLE = (2, 3, 5, 6)
RETIRED = 1
OPEN = 7


def unpack(folder: Path) -> Path:
    """The store of before, in a new folder."""
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    for path in (folder / "store").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder / "store"


def upload(folder: Path, store: ObjectStore) -> None:
    """Put all objects of a folder into another store."""
    for key, content in contents(folder).items():
        store.put(key, content, mode="overwrite")


def version_folder(store: Path, number: int, model: str = MODEL) -> Path:
    """Where a version lies."""
    return store / f"models/{model}/versions/{number:012d}"


def add_model(store: Path, model: str, versions: int) -> None:
    """Add a model with this many versions, each with the bytes of one that the code of before wrote."""
    source = store / "models" / MODEL
    head = json.loads((source / "head.json").read_bytes())
    entries = {entry["number"]: entry for entry in head["versions"]}
    head["versions"] = []
    for number in range(1, versions + 1):
        kept = DURABLE[number % len(DURABLE)]
        shutil.copytree(version_folder(store, kept), version_folder(store, number, model))
        edit(version_folder(store, number, model) / "weighbridge.json", model=model, version=number)
        head["versions"].append({**copy.deepcopy(entries[kept]), "number": number})
    head |= {
        "open": [],
        "failed": [],
        "tombstones": [],
        "next_version": versions + 1,
        "refs": {"latest": versions},
    }
    shutil.copytree(source / "files", store / "models" / model / "files")
    (store / "models" / model / "head.json").write_text(json.dumps(head))


def edit(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))


def spoil(path: Path, place: int = -1) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    """All objects of a store in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
