"""Queries and edits of the tree of a model's history.

All functions are pure except for ``load``, which reads immutable nodes.

An edit is only planned: it returns the new nodes and the reference to the new root. The old tree and the new tree share
all other nodes, so both can be read as long as their nodes are in the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from weighbridge._core.lru import Cache
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.head import history_nodes
from weighbridge_storage.head.history_nodes import Inner, Leaf, Node, NodeRef, span

Load: TypeAlias = Callable[[NodeRef], Node]
"""Reads a node."""
Changes: TypeAlias = Mapping[int, VersionEntry | None]
"""The new entry of each number; None to remove the current entry, if any."""


def find(root: NodeRef | None, number: int, load: Load) -> VersionEntry | None:
    """The entry of a number; None if it does not exist. Reads at most one node of each level."""
    ref = root
    while ref is not None and ref.first <= number <= ref.last:
        node = load(ref)
        if isinstance(node, Leaf):
            return node.entries.get(number)
        ref = node.children.get(_start(number, node.level - 1))
    return None


def descending(
    root: NodeRef | None,
    load: Load,
    below: int | None = None,
    wanted: Callable[[NodeRef], bool] = lambda _ref: True,
) -> Iterator[VersionEntry]:
    """Entries in descending order of their numbers. Each node is read when the iteration reaches it.

    Args:
        root: root of the tree.
        load: reads a node.
        below: omit this number and all higher numbers.
        wanted: returns whether any entry below a node is wanted; if not, the node is not read.
    """
    if root is None or not wanted(root) or (below is not None and root.first >= below):
        return
    node = load(root)
    if isinstance(node, Leaf):
        for number in sorted(node.entries, reverse=True):
            if below is None or number < below:
                yield node.entries[number]
    else:
        for first in sorted(node.children, reverse=True):
            yield from descending(node.children[first], load, below, wanted)


def nbytes(root: NodeRef | None, load: Load, known: Cache[int]) -> int:
    """Total bytes of all entries of a tree.

    Args:
        root: root of the tree.
        load: reads a node.
        known: cache of the bytes below each node, by name. Nodes never change, so only nodes that are new since the
            last call are read.
    """
    if root is None:
        return 0
    found = known.get(root.name)
    if found is None:
        node = load(root)
        if isinstance(node, Leaf):
            found = sum(entry.nbytes for entry in node.entries.values())
        else:
            found = sum(nbytes(child, load, known) for child in node.children.values())
        known.put(root.name, found)
    return found


def names(root: NodeRef | None, load: Load) -> set[str]:
    """Names of all nodes of a tree. Leaves are not read."""
    if root is None:
        return set()
    found = {root.name}
    if root.level:
        for child in _inner(root, load).children.values():
            found |= names(child, load)
    return found


@dataclass(frozen=True, slots=True)
class Edit:
    """Plan of an edit.

    Attributes:
        root: the new root; None if no entries are left.
        nodes: the nodes, by name, that must be written before anything refers to the new root.
    """

    root: NodeRef | None
    nodes: Mapping[str, Node]


def edited(
    root: NodeRef | None,
    changes: Changes,
    load: Load,
    generation: int,
) -> Edit:
    """Add, replace and remove entries.

    Args:
        root: root of the tree.
        changes: the changes by number.
        load: reads a node.
        generation: generation of the head for which the edit is made.
    """
    nodes: dict[str, Node] = {}

    def named(node: Node) -> NodeRef:
        ref = history_nodes.named(node, generation)
        nodes[ref.name] = node
        return ref

    def lifted(ref: NodeRef, level: int) -> NodeRef:
        while ref.level < level:
            ref = named(Inner(ref.level + 1, {ref.first: ref}))
        return ref

    def apply(ref: NodeRef | None, level: int, changes: Changes) -> NodeRef | None:
        """Apply changes to the subtree of ``level`` that covers these numbers.

        ``ref`` is its current node, possibly of a lower level.
        """
        if level == 0:
            leaf = Leaf({}) if ref is None else _leaf(ref, load)
            after = {n: entry for n, entry in {**leaf.entries, **changes}.items() if entry is not None}
            if ref is not None and after == leaf.entries:
                return ref
            return named(replace(leaf, entries=after)) if after else None
        if ref is None or ref.level < level:
            inner = Inner(level, {} if ref is None else {_start(ref.first, level - 1): ref})
        else:
            inner = _inner(ref, load)
        children = dict(inner.children)
        by_child: defaultdict[int, dict[int, VersionEntry | None]] = defaultdict(dict)
        for number, entry in changes.items():
            by_child[_start(number, level - 1)][number] = entry
        for first, own in by_child.items():
            child = apply(children.pop(first, None), level - 1, own)
            if child is not None:
                children[first] = child
        if ref is not None and ref.level == level and children == inner.children:
            return ref
        children = {first: lifted(child, level - 1) for first, child in children.items()}
        return named(replace(inner, children=children)) if children else None

    covered = [n for n, entry in changes.items() if entry is not None]
    covered += [] if root is None else [root.first, root.last]
    if not covered:
        return Edit(None, {})
    level = 0 if root is None else root.level
    while min(covered) // span(level) != max(covered) // span(level):
        level += 1
    here = min(covered) // span(level)
    found = apply(root, level, {n: e for n, e in changes.items() if n // span(level) == here})
    while found is not None and found.level:
        children = _inner(found, lambda ref: nodes.get(ref.name) or load(ref)).children
        if len(children) > 1:
            break
        nodes.pop(found.name, None)
        (found,) = children.values()
    return Edit(found, nodes)


def _start(number: int, level: int) -> int:
    """The lowest number covered by the node of this level that covers ``number``."""
    return number - number % span(level)


def _leaf(ref: NodeRef, load: Load) -> Leaf:
    node = load(ref)
    if isinstance(node, Inner):
        raise TypeError(f"{ref.name} is not a leaf")
    return node


def _inner(ref: NodeRef, load: Load) -> Inner:
    node = load(ref)
    if isinstance(node, Leaf):
        raise TypeError(f"{ref.name} is a leaf")
    return node
