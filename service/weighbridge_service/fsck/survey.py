"""Survey of one model in a store: what its head, its history, its folders and their manifests say. Only reads.

The objects are listed before the head is read, and what a head names and the list lacks is looked for again: so what a service does
meanwhile is not taken for damage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weighbridge.errors import DataLoss, FailedPrecondition, NotFound
from weighbridge_service.models import files_key
from weighbridge_storage.digests import BLOCK_BYTES, DIGEST_BYTES
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.history import NodeMissing
from weighbridge_storage.history_nodes import Leaf, NodeRef
from weighbridge_storage.manifest import Manifest
from weighbridge_storage.names import (
    MANIFEST_FILE,
    ModelName,
    blocks_key,
    node_key,
    node_of_key,
    numbered_key,
    version_key,
)
from weighbridge_storage.objects import ObjectStore

_AT_ONCE = 16
"""Versions that are looked at at a time."""


@dataclass(frozen=True)
class VersionFolder:
    """What lies in a version's folder.

    Attributes:
        manifest: None if there is none that can be read.
        problems: what is missing, or has another size than the manifest says; empty if the version is whole.
        bad_blocks: files whose block digests are missing or have another size.
        has_manifest: whether there is a manifest, readable or not; without one, the folder was never complete, or is half deleted.
        foreign: whether another release of Weighbridge can read the manifest.
    """

    manifest: Manifest | None
    problems: tuple[str, ...]
    bad_blocks: tuple[str, ...] = ()
    has_manifest: bool = True
    foreign: bool = False

    @property
    def whole(self) -> bool:
        """Whether the version can be read."""
        return not self.problems


@dataclass(frozen=True)
class Survey:
    """What the objects of one model say.

    Attributes:
        model: which model.
        head: None if there is none that can be read.
        text: of the head, readable or not; None if there is none.
        etag: of that text.
        unreadable: why the head cannot be read; empty if it can.
        foreign: whether another release of Weighbridge can read it and its history.
        entries: the versions that the head leads to, as far as its history can be read.
        lost_nodes: references to nodes of the history that cannot be read, and why.
        folders: the keys in the model's numbered folders.
        versions: what lies in the folders of versions, and in those that should be there.
        last_node: the highest generation of a node of the history; 0 if there are none.
        lost_files: registered files that are missing.
    """

    model: ModelName
    head: Head | None
    text: bytes | None
    etag: str | None
    unreadable: str
    foreign: bool
    entries: Mapping[int, VersionEntry]
    lost_nodes: tuple[tuple[NodeRef, str], ...]
    folders: Mapping[int, tuple[str, ...]]
    versions: Mapping[int, VersionFolder]
    last_node: int
    lost_files: tuple[str, ...]


def survey_model(store: ObjectStore, heads: HeadStore, model: ModelName) -> Survey:
    """Look at all objects of a model, and read everything but its weights.

    Raises:
        WeighbridgeError: the store cannot be read.
    """
    folders: defaultdict[int, list[str]] = defaultdict(list)
    last_node = 0
    for key in store.list(model.prefix):
        place, node = numbered_key(model, key), node_of_key(model, key)
        if place is not None:
            folders[place[1]].append(key)
        elif node is not None:
            last_node = max(last_node, node[1])
    head: Head | None = None
    text: bytes | None = None
    etag: str | None = None
    unreadable, foreign = "", False
    entries: Mapping[int, VersionEntry] = {}
    lost_nodes: tuple[tuple[NodeRef, str], ...] = ()
    try:
        text, etag = store.get(model.head_key)
        head = Head.from_json(text, model.head_key)
        entries, lost_nodes = _read_history(heads, model, head)
    except NotFound:
        unreadable = "its head is missing"
    except DataLoss as error:
        unreadable = error.message
    except FailedPrecondition as error:
        head, unreadable, foreign = None, str(error), True
    if head is not None:
        # a collection may have deleted what the head does not lead to any more since it was listed
        for number in folders.keys() - entries.keys() - head.open.keys():
            folders[number] = [key for key in folders[number] if _size(store, key) is not None]
    numbers = sorted(entries.keys() | {n for n, keys in folders.items() if _has_version(model, keys)})
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="survey") as pool:
        looked = dict(zip(numbers, pool.map(lambda n: _look(store, model, n), numbers), strict=True))
    return Survey(
        model=model,
        head=head,
        text=text,
        etag=etag,
        unreadable=unreadable,
        foreign=foreign,
        entries=entries,
        lost_nodes=lost_nodes,
        folders={number: tuple(keys) for number, keys in folders.items() if keys},
        versions=looked,
        last_node=last_node,
        lost_files=() if head is None else _lost_files(store, model, head),
    )


def _has_version(model: ModelName, keys: list[str]) -> bool:
    return any(
        place is not None and place[0] == "versions" for place in (numbered_key(model, k) for k in keys)
    )


def _read_history(
    heads: HeadStore, model: ModelName, head: Head
) -> tuple[dict[int, VersionEntry], tuple[tuple[NodeRef, str], ...]]:
    """The entries that a head leads to, and the nodes that cannot be read. Raises FailedPrecondition for one of another release."""
    found = dict(head.recent)
    lost: list[tuple[NodeRef, str]] = []
    rest = [head.root] if head.root is not None else []
    while rest:
        ref = rest.pop()
        try:
            node = heads.load_node(model, ref)
        except NodeMissing:
            lost.append((ref, f"{node_key(model, ref.name)} is missing"))
        except DataLoss as error:
            lost.append((ref, error.message))
        else:
            if isinstance(node, Leaf):
                found |= {n: entry for n, entry in node.entries.items() if head.in_tree(n)}
            else:
                rest += node.children.values()
    return found, tuple(lost)


def _look(store: ObjectStore, model: ModelName, number: int) -> VersionFolder:
    """What lies in the folder of one version."""
    key = version_key(model, number, MANIFEST_FILE)
    try:
        manifest = Manifest.from_json(store.get(key)[0], key)
    except NotFound:
        return VersionFolder(None, ("its manifest is missing",), has_manifest=False)
    except (DataLoss, FailedPrecondition) as error:
        return VersionFolder(None, (error.message,), foreign=isinstance(error, FailedPrecondition))
    if (manifest.model, manifest.version) != (model, number):
        return VersionFolder(None, (f"its manifest is that of {manifest.model}@{manifest.version}",))
    problems = []
    for name, file in manifest.files.items():
        size = _size(store, version_key(model, number, name))
        if size is None:
            problems.append(f"{name} is missing")
        elif size != file.size:
            problems.append(f"{name} has {size} bytes instead of {file.size}")
    bad_blocks = [
        name
        for name in sorted(manifest.weight_files)
        if _size(store, blocks_key(model, number, name))
        != -(-manifest.files[name].size // BLOCK_BYTES) * DIGEST_BYTES
    ]
    return VersionFolder(manifest, tuple(problems), tuple(bad_blocks))


def _lost_files(store: ObjectStore, model: ModelName, head: Head) -> tuple[str, ...]:
    """The registered files that are missing."""
    names = head.registration.get("files", [])
    return tuple(name for name in names if _size(store, files_key(model, head.files_id, name)) is None)


def _size(store: ObjectStore, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFound:
        return None
