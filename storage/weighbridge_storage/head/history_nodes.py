"""Nodes of the tree that contains the history of a model: immutable values, and their text.

The tree is a radix tree over version numbers. A **leaf** (level 0) holds the entries of up to `FANOUT` consecutive
numbers, from a multiple of `FANOUT` on. An **inner node** of level k has up to `FANOUT` children of level k - 1 and
covers ``FANOUT ** (k + 1)`` numbers, from a multiple of that on. Nodes without entries are not stored. The root is the
lowest node that covers everything.

A node is an object in the store that never changes: its name contains the digest of its text. An edit writes new nodes
for the paths from the changed leaves to the root (`history_tree`), and the head names the new root. So an intact head
verifies every byte of the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.documents import document_digests, entry_json, strict_json
from weighbridge_storage.documents.entries import VersionEntry, check_number
from weighbridge_storage.documents.names import MAX_VERSION, check_node_name, node_name

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
"""The features that a node may require in this release: none yet."""
FANOUT = 64
MAX_LEVEL = 6
"""The level of a root that covers all numbers up to `MAX_VERSION`."""


def span(level: int) -> int:
    """Number of version numbers that a node of this level covers."""
    return int(FANOUT ** (level + 1))


@entry_json.nested
@dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to a node, with a summary of the entries below it.

    Attributes:
        name: the node's name (`names.node_name`).
        level: 0 for a leaf.
        last: the highest number below it.
        durable: number of entries below it that are part of history.
        retired: number of entries below it that were removed from history.
        held: number of its durable entries that are held.
        extra: fields that this release does not know. A reference to another node does not inherit them.

    Raises:
        InvalidArgument: a number is out of bounds, or the name is malformed.
    """

    name: str
    level: int
    last: int
    durable: int
    retired: int
    held: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_node_name(self.name)
        check_number("level", self.level, 0, MAX_LEVEL)
        check_number("last", self.last, 1, MAX_VERSION)
        for name in ("durable", "retired"):
            check_number(name, getattr(self, name), 0, span(self.level))
        check_number("held", self.held, 0, self.durable)
        if not self.durable + self.retired:
            raise InvalidArgument(f"node {self.name} has no entries")

    @property
    def first(self) -> int:
        """The lowest number that the node covers."""
        return self.last - self.last % span(self.level)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Entries of up to `FANOUT` consecutive numbers.

    Attributes:
        entries: entries by number.
        extra: the fields that this release does not know; they stay when the node is edited.
    """

    entries: Mapping[int, VersionEntry]
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def reference(self, name: str) -> NodeRef:
        """A reference to this node under a name."""
        retired = sum(entry.retired for entry in self.entries.values())
        held = sum(bool(entry.held) for entry in self.entries.values() if not entry.retired)
        return NodeRef(name, 0, max(self.entries), len(self.entries) - retired, retired, held)


@dataclass(frozen=True, slots=True)
class Inner:
    """References to up to `FANOUT` nodes of the level below.

    Attributes:
        level: above 0.
        children: references by the lowest number that each covers.
        extra: the fields that this release does not know; they stay when the node is edited.
    """

    level: int
    children: Mapping[int, NodeRef]
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def reference(self, name: str) -> NodeRef:
        """A reference to this node under a name."""
        children = self.children.values()
        return NodeRef(
            name,
            self.level,
            max(child.last for child in children),
            sum(child.durable for child in children),
            sum(child.retired for child in children),
            sum(child.held for child in children),
        )


Node: TypeAlias = Leaf | Inner


def to_json(node: Node) -> bytes:
    """A node as the text of its object."""
    document: dict[str, Any] = {**node.extra, "format": FORMAT, "requires": []}
    if isinstance(node, Leaf):
        document |= {"level": 0, "entries": entry_json.list_to_json(node.entries)}
    else:
        children = [entry_json.to_json(node.children[first]) for first in sorted(node.children)]
        document |= {"level": node.level, "children": children}
    return strict_json.encode(document)


def named(node: Node, generation: int) -> NodeRef:
    """A reference to a node, under its name if it is written for the head of this generation."""
    return node.reference(node_name(generation, document_digests.digest_of(to_json(node))))


def from_json(data: bytes, ref: NodeRef, where: str) -> Node:
    """Read the text of the node that ``ref`` names; ``where`` names it in errors.

    Raises:
        DataLoss: it is malformed, or differs from the reference; the message says how to repair the history.
        FailedPrecondition: it has another format, or requires a feature that is unknown here; the message states the
            fix.
    """
    try:
        if not ref.name.endswith(f"-{document_digests.digest_of(data)}"):
            raise DataLoss(f"{where} does not agree with the digest in its name")
        return _from_json(data, ref, where)
    except DataLoss as error:
        raise DataLoss(error.message, fix=document_digests.REPAIR) from error


def _from_json(data: bytes, ref: NodeRef, where: str) -> Node:
    document = strict_json.decode(data, where)
    document.check_format(FORMAT)
    document.required(FEATURES)
    level = document.integer("level")
    node: Node
    with strict_json.malformed_as_data_loss(where):
        if level == 0:
            listed = entry_json.list_from_json(VersionEntry, document.array("entries"), f"{where}, entries")
            node = Leaf(listed, document.rest())
        else:
            references = [
                entry_json.from_json(NodeRef, item, f"{where}, children[{i}]")
                for i, item in enumerate(document.array("children"))
            ]
            if any(child.level != level - 1 for child in references):
                raise DataLoss(f"{where} has children that are not of level {level - 1}")
            children = {child.first: child for child in references}
            if len(children) != len(references):
                raise DataLoss(f"{where} lists a child twice")
            node = Inner(level, children, document.rest())
    numbers = node.entries if isinstance(node, Leaf) else node.children
    if not all(ref.first <= number < ref.first + span(ref.level) for number in numbers):
        raise DataLoss(f"{where} has entries outside of its range")
    summary = node.reference(ref.name) if numbers else None
    if summary != replace(ref, extra={}):
        raise DataLoss(f"{where} does not match the reference to it")
    return node
