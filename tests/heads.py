"""Heads and histories for tests: nodes in memory, and what a store has of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weighbridge_storage import history_nodes
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.history import History, NodeMissing, settled
from weighbridge_storage.history_nodes import Node, NodeRef
from weighbridge_storage.names import ModelName, node_name
from weighbridge_storage.objects import ObjectStore


class Nodes:
    """Nodes as a store keeps them: as text, each written once."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.loaded: list[NodeRef] = []
        self._count = itertools.count(1)

    def new_name(self, generation: int = 1) -> str:
        return node_name(generation, f"{next(self._count):032x}")

    def load(self, ref: NodeRef) -> Node:
        self.loaded.append(ref)
        if ref.name not in self.texts:
            raise NodeMissing(ref.name)
        return history_nodes.from_json(self.texts[ref.name], ref, ref.name)

    def write(self, nodes: Mapping[str, Node]) -> None:
        assert not self.texts.keys() & nodes.keys(), "a name is used once"
        self.texts |= {name: history_nodes.to_json(node) for name, node in nodes.items()}

    def settle(self, head: Head, most: int) -> Head:
        """The head with all but a few of its entries moved into the tree."""
        after, nodes = settled(head, self.load, lambda: self.new_name(head.generation), most)
        self.write(nodes)
        return after

    def history(self, head: Head) -> History:
        return History(head, self.load)

    def loads(self, action: Callable[[], Any]) -> tuple[Any, list[int]]:
        """What an action gives, and the levels of the nodes that it loads."""
        self.loaded = []
        result = action()
        return result, [ref.level for ref in self.loaded]


def history(head: Head) -> History:
    """The history of a head that has no tree."""
    return History(head, Nodes().load)


def in_memory(head: Head, *versions: VersionEntry) -> History:
    """The history of a head, all of whose entries are these."""
    recent = {entry.number: entry for entry in versions}
    return history(replace(head, recent=recent, removed=frozenset(), root=None))


def stored(store: ObjectStore, model: ModelName) -> History:
    """What a store says of a model."""
    found = HeadStore(store).history(model)
    assert found is not None
    return found
