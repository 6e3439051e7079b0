"""Small store with versions in every state, as tests damage it, copy it and read it."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.support.heads import edit_document
from weighbridge_storage.documents.entries import Ref
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore

ARCHIVE = Path(__file__).parents[1] / "data/store.tar.xz"
"""The store that data/write_store.py wrote."""
MODEL = "acme/smol"
DURABLE = (2, 3, 5, 6)
RETIRED = 1
OPEN = 7


def unpack(folder: Path) -> Path:
    """The store, in a new folder."""
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
    """Folder of a version."""
    return store / f"models/{model}/versions/{number:012d}"


def add_model(store: Path, model: str, numbers: Iterable[int]) -> None:
    """Add a model with versions of these numbers, each with the bytes of one of `MODEL`; most of its history is in a
    tree.
    """
    name, kept = ModelName.parse(model), {}
    shutil.copytree(store / "models" / MODEL / "files", store / name.prefix / "files")
    with closing(LocalStore(store)) as opened:
        heads = HeadStore(opened)
        source = heads.read(ModelName.parse(MODEL))
        assert source is not None
        for index, number in enumerate(numbers):
            entry = source[0].recent[DURABLE[index % len(DURABLE)]]
            shutil.copytree(version_folder(store, entry.number), version_folder(store, number, model))
            edit_document(version_folder(store, number, model) / "weighbridge.json", model=model, version=number)
            kept[number] = replace(entry, number=number)
        last = max(kept)
        head = replace(source[0], recent=kept, open={}, failed={}, refs={"latest": Ref(last)}, next_version=last + 1)
        opened.put(name.head_key, heads.settle(name, head).to_json(), mode="create")


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
