"""Heads, histories and manifests for tests: nodes in memory, texts with digests, and what a store has of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from weighbridge_storage.documents.entries import OpenEntry, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head import history_nodes, open_versions
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History, NodeMissing, settled
from weighbridge_storage.head.history_nodes import Node, NodeRef
from weighbridge_storage.head.open_versions import AskedVersion, claim_version, give_up_version
from weighbridge_storage.stores.objects import ObjectStore


class Nodes:
    """Nodes as a store keeps them: as text."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.loaded: list[NodeRef] = []

    def load(self, ref: NodeRef) -> Node:
        self.loaded.append(ref)
        if ref.name not in self.texts:
            raise NodeMissing(ref.name)
        return history_nodes.from_json(self.texts[ref.name], ref, ref.name)

    def write(self, nodes: Mapping[str, Node]) -> None:
        for name, node in nodes.items():
            text = history_nodes.to_json(node)
            assert self.texts.setdefault(name, text) == text, "a node never changes"

    def settle(self, head: Head, most: int) -> Head:
        """The head with all but a few of its entries moved into the tree."""
        after, nodes = settled(head, self.load, most)
        self.write(nodes)
        return after

    def history(self, head: Head) -> History:
        return History(head, self.load)

    def loads(self, action: Callable[[], Any]) -> tuple[Any, list[int]]:
        """Result of an action, and the levels of the nodes that it loads."""
        self.loaded = []
        result = action()
        return result, [ref.level for ref in self.loaded]


def text_of(document: Mapping[str, Any]) -> bytes:
    """The text of a head or a manifest of which a program has written these fields: with the digest of what comes
    before it.
    """
    return with_digest(json.dumps({k: value for k, value in document.items() if k != "digest"}).encode())


def with_digest(text: bytes) -> bytes:
    """The text of a JSON object, with its digest as the last field."""
    start = text.removesuffix(b"}")
    return start + b',"digest":"' + blake3(start).hexdigest().encode() + b'"}'


def edit_document(path: Path, **fields: Any) -> None:
    """Replace fields of a head or a manifest as a program does that writes such documents."""
    path.write_bytes(text_of({**json.loads(path.read_bytes()), **fields}))


def text_of_node(document: Mapping[str, Any], ref: NodeRef) -> tuple[bytes, NodeRef]:
    """The text of a node that has these fields, and what refers to it as ``ref`` did to another one."""
    text = json.dumps(document).encode()
    generation = ref.name.partition("-")[0]
    return text, replace(ref, name=f"{generation}-{blake3(text).hexdigest()}")


def history(head: Head) -> History:
    """The history of a head that has no tree."""
    return History(head, Nodes().load)


def in_memory(head: Head, *versions: VersionEntry) -> History:
    """The history of a head, all of whose entries are these."""
    recent = {entry.number: entry for entry in versions}
    return history(replace(head, recent=recent, removed=frozenset(), root=None))


def stored(store: ObjectStore, model: ModelName) -> History:
    """History of a model in a store."""
    found = HeadStore(store).history(model)
    assert found is not None
    return found


def entry(number: int, write_id: str = "w") -> VersionEntry:
    """History entry of a version."""
    return VersionEntry(
        number=number,
        step=number * 10,
        run="r",
        created_ms=1,
        nbytes=2,
        tensor_count=3,
        files_id="f",
        write_id=f"{write_id}{number}",
    )


def open_version(head: Head, *, now_ms: int, **asked: Any) -> tuple[Head, OpenEntry]:
    """The head after a version was opened as it is `AskedVersion`."""
    return open_versions.open_version(head, AskedVersion(**asked), now_ms)


def opened(head: Head, request_id: str = "", now_ms: int = 1000) -> tuple[Head, OpenEntry]:
    """The head after a version was opened, by a request of its own unless one is named."""
    return open_version(
        head,
        request_id=request_id or f"request {head.next_version}",
        step=head.next_version * 10,
        run="r",
        ranks=2,
        now_ms=now_ms,
        lease_ms=100,
    )


def allocate(head: Head) -> tuple[Head, int]:
    """The head after a version was opened, and its number."""
    changed, there = opened(head)
    return changed, there.number


def published(head: Head, number: int) -> Head:
    """The head after an open version was published."""
    done = entry(number)
    return publish(history(claim_version(head, number, done.write_id)), done)


def head_with(*numbers: int) -> Head:
    """A head whose history has these versions, and no others below the last."""
    head = Head()
    for _ in range(max(numbers)):
        head, _ = opened(head)
    for number in numbers:
        head = published(head, number)
    for number in list(head.open):
        head = give_up_version(head, number, "not wanted", 1)
    return head
