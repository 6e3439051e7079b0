"""Survey of one model in a store: its head, its history, its folders and their manifests. The survey only reads.

Objects are listed before the head is read, and objects that the head refers to are looked up individually. So the
survey does not mistake concurrent changes by a service for damage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weighbridge._core.metadata import Metadata, checked_metadata
from weighbridge._formats.safetensors_files import INDEX_FILE
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from weighbridge_service.models.listed_tensors import read_tensor_list
from weighbridge_service.models.registration import check_registration, files_key
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import (
    MANIFEST_FILE,
    ModelName,
    blocks_key,
    node_key,
    node_of_key,
    numbered_key,
    version_key,
)
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import NodeMissing
from weighbridge_storage.head.history_nodes import Leaf, NodeRef
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.digests import BLOCK_BYTES, DIGEST_BYTES
from weighbridge_storage.versions.manifest import Manifest

_AT_ONCE = 16
"""Number of concurrent requests."""
_MAX_GENERATION = 10**18
"""Maximum generation of a node. A head is never written that often, so Weighbridge did not write nodes of higher
generations. The generation of the next head must stay far below 2^63.
"""


@dataclass(frozen=True)
class SurveyedVersion:
    """Summary of a version from its manifest. A complete manifest may take a hundred megabytes.

    Attributes:
        step, run, created_ms, nbytes, tensor_count, nonfinite_elements: as in the version's entry.
        tensor_bytes: as in the entry of a training state.
        held: reasons why the version was held when the manifest was written.
        metadata: metadata of the push.
        side_files: names of the files other than weights, with the roots of their digests.
    """

    step: int
    run: str
    created_ms: int
    nbytes: int
    tensor_count: int
    nonfinite_elements: int
    tensor_bytes: int
    held: tuple[str, ...]
    metadata: Metadata
    side_files: Mapping[str, str]

    @staticmethod
    def of(manifest: Manifest) -> SurveyedVersion:
        """The summary of a manifest."""
        return SurveyedVersion(
            step=manifest.step,
            run=manifest.run,
            created_ms=manifest.created_ms,
            nbytes=sum(manifest.files[name].size for name in manifest.weight_files),
            tensor_count=len(manifest.tensors),
            nonfinite_elements=manifest.nonfinite_elements,
            tensor_bytes=sum(tensor.nbytes for tensor in manifest.tensors.values()),
            held=manifest.held,
            metadata=_kept(manifest.metadata),
            side_files={
                name: file.blake3
                for name, file in manifest.files.items()
                if name not in manifest.weight_files and name != INDEX_FILE
            },
        )

    def contradictions(self, entry: VersionEntry) -> tuple[str, ...]:
        """Names of the fields in which an entry of the history differs."""
        names = ("step", "run", "created_ms", "nbytes", "tensor_count", "nonfinite_elements")
        return tuple(name for name in names if getattr(self, name) != getattr(entry, name))


def _kept(metadata: Metadata) -> Metadata:
    """The metadata of a manifest if it is valid for an entry, otherwise empty: other programs may have written larger
    metadata.
    """
    try:
        return checked_metadata(metadata)
    except InvalidArgument:
        return {}


@dataclass(frozen=True)
class VersionFolder:
    """State of a version's folder.

    Attributes:
        described: summary of its manifest; None if the manifest is missing or unreadable.
        problems: missing files, and files whose size differs from the manifest; empty if the version is whole.
        bad_blocks: names of files whose block digests are missing or have the wrong size.
        has_manifest: whether a manifest exists, readable or not. Without a manifest, the folder was never complete, or
            is partly deleted.
        foreign: whether another release of Weighbridge can read the manifest.
    """

    described: SurveyedVersion | None
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
    """State of one model's objects.

    Attributes:
        model: name of the model.
        head: the head; None if it is missing or unreadable.
        text: text of the head, readable or not; None if it is missing.
        etag: ETag of that text.
        unreadable: reason why the head cannot be read; empty if it is readable.
        foreign: whether another release of Weighbridge can read the head and its history.
        unregistered: problem of the registration in the head; empty if the registration is valid.
        entries: entries of the versions in the readable part of the history, by number.
        lost_nodes: references to unreadable nodes of the history, each with the reason.
        folders: keys of the objects in the model's numbered folders, by number.
        versions: states of the folders of versions, including folders that should exist, by number.
        last_node: highest generation of a node of the history; 0 if the history has no nodes.
        lost_files: names of registered files that are missing.
    """

    model: ModelName
    head: Head | None
    text: bytes | None
    etag: str | None
    unreadable: str
    foreign: bool
    unregistered: str
    entries: Mapping[int, VersionEntry]
    lost_nodes: tuple[tuple[NodeRef, str], ...]
    folders: Mapping[int, tuple[str, ...]]
    versions: Mapping[int, VersionFolder]
    last_node: int
    lost_files: tuple[str, ...]


def survey_model(
    store: ObjectStore,
    heads: HeadStore,
    model: ModelName,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Survey:
    """Survey all objects of a model. Reads all of them except the weights.

    Args:
        store: the store.
        heads: heads of the store.
        model: name of the model.
        on_progress: called with the number of surveyed versions, and their total.

    Raises:
        WeighbridgeError: the store cannot be read.
    """
    folders: defaultdict[int, list[str]] = defaultdict(list)
    last_node = 0
    for key in store.list(model.prefix):
        place, node = numbered_key(model, key), node_of_key(model, key)
        if place is not None:
            folders[place[1]].append(key)
        elif node is not None and node[1] <= _MAX_GENERATION:
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
    unregistered = "" if head is None or head.deleted else _wrong_registration(store, model, head)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="survey") as pool:
        if head is not None:
            # a collection may have deleted objects that the head no longer refers to since they were listed
            strays = [key for n in folders.keys() - entries.keys() - head.open.keys() for key in folders[n]]
            sizes = pool.map(lambda key: _size(store, key), strays)
            gone = {key for key, size in zip(strays, sizes, strict=True) if size is None}
            folders = defaultdict(list, {n: [key for key in keys if key not in gone] for n, keys in folders.items()})
        numbers = sorted(entries.keys() | {n for n, keys in folders.items() if _has_version(model, keys)})
        looked: dict[int, VersionFolder] = {}
        for folder in pool.map(lambda n: _look(store, model, n), numbers):
            looked[numbers[len(looked)]] = folder
            on_progress(len(looked), len(numbers))
        missing = () if head is None or head.deleted or unregistered else _lost_files(store, model, head)
    return Survey(
        model=model,
        head=head,
        text=text,
        etag=etag,
        unreadable=unreadable,
        foreign=foreign,
        unregistered=unregistered,
        entries=entries,
        lost_nodes=lost_nodes,
        folders={number: tuple(keys) for number, keys in folders.items() if keys},
        versions=looked,
        last_node=last_node,
        lost_files=missing,
    )


def _has_version(model: ModelName, keys: list[str]) -> bool:
    return any(place is not None and place[0] == "versions" for place in (numbered_key(model, k) for k in keys))


def _read_history(
    heads: HeadStore, model: ModelName, head: Head
) -> tuple[dict[int, VersionEntry], tuple[tuple[NodeRef, str], ...]]:
    """All entries in the history of a head, and the nodes that cannot be read.

    Raises FailedPrecondition for a node of another release.
    """
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
    """Survey the folder of one version."""
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
        if _size(store, blocks_key(model, number, name)) != -(-manifest.files[name].size // BLOCK_BYTES) * DIGEST_BYTES
    ]
    return VersionFolder(SurveyedVersion.of(manifest), tuple(problems), tuple(bad_blocks))


def _wrong_registration(store: ObjectStore, model: ModelName, head: Head) -> str:
    """Problem of the registration in a head, or of the list of tensors that it names; empty if both are valid."""
    try:
        listed = check_registration(model, head).listed
        if listed:
            read_tensor_list(store, model, listed, head.first_version)
    except DataLoss as error:
        return error.message
    return ""


def _lost_files(store: ObjectStore, model: ModelName, head: Head) -> tuple[str, ...]:
    """Names of the registered files that are missing."""
    names = head.registration["files"]
    return tuple(name for name in names if _size(store, files_key(model, head.files_id, name)) is None)


def _size(store: ObjectStore, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFound:
        return None
