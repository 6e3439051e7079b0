"""History of a model: the versions that can be read, as one head has them.

The head holds the entries of the newest few versions, and changes of older ones; the rest is in a tree of immutable nodes
(`history_tree`), of which the head names the root. So what a push reads and writes does not grow with the number of versions.

What holds at any time, whoever writes or dies:

1. *A head says everything.* Which versions there are follows from one head and the tree below its root; `settled` moves entries from
   the head into the tree and changes nothing of that.
2. *Nodes come first.* All nodes of a new root are in the store before the head that names it is written. That write is conditional
   on the head from which the new tree was made, so the root in the store is always the one that was edited. A writer that loses makes
   its edit again, from the new head; the nodes that it wrote are below no root, and never will be.
3. *A node never changes.* Its name has the generation of the head for which it was written, and the digest of its text. So nodes can be
   cached for good, and whoever reads one finds out whether it is damaged.
4. *A node of the past stays in the past.* A head of generation g names nodes of generations up to g only, and a writer that made
   nodes of generation g can only write the head of generation g. So a node of a generation up to that of the present head that is
   not below its root will never be below any. `unreachable` goes by that, and `collecting` leaves such nodes for the grace time to
   those who read with an older head.
5. *A reader is never stuck.* Whoever has an older head and finds a node gone reads the head again and asks that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from weighbridge._core.lru import Cache
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.head import history_tree
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history_nodes import Node, NodeRef
from weighbridge_storage.head.history_tree import Load

MOST_RECENT = 32
"""Most entries and removals that a head holds; if there are more, all but the entries of the highest half as many go into the tree."""

T = TypeVar("T")


class NodeMissing(Exception):
    """A node is not in the store: the head that leads to it is out of date, or the history is damaged."""


class History:
    """The versions that a model's head leads to.

    Args:
        head: the model's.
        load: reads a node; raises NodeMissing if it is not there.
        newer: gives a head to go on with if a node is missing, or raises. Without it NodeMissing is raised.

    Attributes:
        head: as given; answers may come from a newer one.

    Raises:
        WeighbridgeError: from every query, as ``load`` and ``newer``.
    """

    def __init__(self, head: Head, load: Load, newer: Callable[[Head], Head] | None = None) -> None:
        self.head = head
        self._load = load
        self._newer = newer

    def under(self, head: Head) -> History:
        """The versions that another head leads to, which was made from this one's."""
        return History(head, self._load, self._newer)

    def find(self, number: int) -> VersionEntry | None:
        """The entry of a version that is durable, or was and whose objects may still be there; None if it is neither."""

        def ask(head: Head) -> VersionEntry | None:
            if head.in_tree(number):
                return history_tree.find(head.root, number, self._load)
            return head.recent.get(number)

        return self._ask(ask)

    def durable(self, number: int) -> VersionEntry | None:
        """The entry of a version that is part of history; None if it is not."""
        entry = self.find(number)
        return None if entry is None or entry.retired else entry

    def is_gone(self, number: int) -> bool:
        """Whether a number was given and stands for nothing any more: its version was given up, or deleted and forgotten.

        That is for good, so whatever lies under such a number is nobody's.
        """
        given = number < self.head.next_version and number not in self.head.open
        return given and self.find(number) is None

    def newest(self, limit: int, below: int | None = None) -> list[VersionEntry]:
        """The highest ``limit`` versions that are part of history, of those below a number if one is given; the highest first."""
        return self._ask(
            lambda head: list(
                islice(
                    (
                        entry
                        for entry in self._descending(head, below, lambda ref: ref.durable > 0)
                        if not entry.retired
                    ),
                    limit,
                )
            )
        )

    def versions(self) -> dict[int, VersionEntry]:
        """All versions that are part of history, by number in ascending order."""
        found = self._ask(lambda head: list(self._descending(head, None, lambda ref: ref.durable > 0)))
        return {entry.number: entry for entry in reversed(found) if not entry.retired}

    def retired(self) -> dict[int, VersionEntry]:
        """All versions that were taken out of history, by number in ascending order; reads only nodes that have some."""
        found = self._ask(lambda head: list(self._descending(head, None, lambda ref: ref.retired > 0)))
        return {entry.number: entry for entry in reversed(found) if entry.retired}

    def nbytes(self, known: Cache[int]) -> int:
        """Bytes of the weights of all versions that are durable, or were and whose objects may still be there, or are being received.

        Args:
            known: bytes below nodes of the tree; see `history_tree.nbytes`.
        """

        def ask(head: Head) -> int:
            there = history_tree.nbytes(head.root, self._load, known)
            changed = (history_tree.find(head.root, n, self._load) for n in (*head.recent, *head.removed))
            there -= sum(entry.nbytes for entry in changed if entry is not None)
            there += sum(entry.nbytes for entry in head.recent.values())
            return there + sum(entry.nbytes for entry in head.open.values())

        return self._ask(ask)

    def _descending(
        self, head: Head, below: int | None, wanted: Callable[[NodeRef], bool]
    ) -> Iterator[VersionEntry]:
        """What the head says and, where it says nothing, the tree; from the highest number on."""
        tree = history_tree.descending(head.root, self._load, below, wanted)
        rest = (entry for entry in tree if head.in_tree(entry.number))
        ahead: VersionEntry | None = None
        bound = 0 if head.root is None else head.root.last  # the tree has no higher number to come
        for number in sorted(head.recent, reverse=True):
            if below is not None and number >= below:
                continue
            while bound > number:
                ahead = ahead or next(rest, None)
                bound = 0 if ahead is None else ahead.number
                if ahead is not None and bound > number:
                    yield ahead
                    ahead = None
            yield head.recent[number]
        if ahead is not None:
            yield ahead
        yield from rest

    def _ask(self, question: Callable[[Head], T]) -> T:
        head = self.head
        while True:
            try:
                return question(head)
            except NodeMissing:
                if self._newer is None:
                    raise
                head = self._newer(head)


def settled(head: Head, load: Load, most: int = MOST_RECENT) -> tuple[Head, Mapping[str, Node]]:
    """A head that leads to the same history, and does not hold too many of its entries itself.

    Args:
        head: what is to be written next, with its generation.
        load: reads a node.
        most: how many entries and removals are not too many.

    Returns:
        The head, and the nodes to be written before it, by name.
    """
    if len(head.recent) + len(head.removed) <= most:
        return head, {}
    kept = set(sorted(head.recent, reverse=True)[: most // 2])
    moved: dict[int, VersionEntry | None] = dict.fromkeys(head.removed)
    moved |= {number: entry for number, entry in head.recent.items() if number not in kept}
    edit = history_tree.edited(head.root, moved, load, head.generation)
    after = replace(
        head, root=edit.root, removed=frozenset(), recent={number: head.recent[number] for number in kept}
    )
    return after, edit.nodes


def unreachable(head: Head, nodes: Mapping[str, int], load: Load) -> set[str]:
    """The nodes that no head from this one on leads to.

    Args:
        head: the model's.
        nodes: generation by name.
        load: reads a node.
    """
    return _not_below(head.root, head.generation, nodes, load)


def unreachable_since_mark(head: Head, nodes: Mapping[str, int], load: Load) -> set[str]:
    """The nodes that no head from the one on leads to that the mark was made of; none if there is no mark."""
    if head.mark is None:
        return set()
    return _not_below(head.mark.root, head.mark.generation, nodes, load)


def _not_below(root: NodeRef | None, generation: int, nodes: Mapping[str, int], load: Load) -> set[str]:
    old: Collection[str] = {name for name, written in nodes.items() if written <= generation}
    return set(old) - history_tree.names(root, load) if old else set()
