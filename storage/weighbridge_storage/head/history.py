"""History of a model: the readable versions according to one head.

The head contains the entries of the few newest versions, and changes to older entries. All other entries are in a tree
of immutable nodes (`history_tree`), and the head names its root. So the number of bytes that a push reads and writes
does not grow with the number of versions.

These invariants hold at any time, with any number of writers, which may crash:

1. *A head is complete.* One head and the tree below its root determine all versions. `settled` moves entries from the
   head into the tree
without changing the versions.
2. *Nodes come first.* All nodes of a new root are in the store before the head that names it is written. That write is
   a compare-and-swap on the head from which the new tree was made, so the root in the store is always the one that was
   edited. A writer that loses repeats its edit from the new head; the nodes that it wrote are not below any root, and
   never will be.
3. *A node never changes.* Its name contains the generation of the head for which it was written, and the digest of its
   text. So nodes can
be cached indefinitely, and a reader detects a damaged node.
4. *An unreachable node stays unreachable.* A head of generation g names nodes of generations up to g only, and a writer
   that made nodes of generation g can only write the head of generation g. So if a node's generation is not higher than
   that of the current head and the node is not below its root, it will never be below any root. `unreachable` relies on
   this, and `collecting` keeps such nodes for the grace time, for readers with an older head.
5. *A reader is never stuck.* If a reader with an older head finds that a node was deleted, it reads the head again and
   repeats its query.
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
"""Maximum number of entries and removals in a head. If there are more, only the entries with the highest numbers stay
in the head, half as many as this.
"""

T = TypeVar("T")


class NodeMissing(Exception):
    """A node is not in the store: the head that leads to it is outdated, or the history is damaged."""


class History:
    """The versions in a head and the tree below it.

    Args:
        head: the model's head.
        load: reads a node; raises NodeMissing if it is not in the store.
        newer: returns a newer head after a node was found missing, or raises. Without it NodeMissing is raised.

    Attributes:
        head: the given head; results may come from a newer one.

    Raises:
        WeighbridgeError: from every query, as ``load`` and ``newer`` raise it.
    """

    def __init__(self, head: Head, load: Load, newer: Callable[[Head], Head] | None = None) -> None:
        self.head = head
        self._load = load
        self._newer = newer

    def under(self, head: Head) -> History:
        """The history of another head that was derived from this history's head."""
        return History(head, self._load, self._newer)

    def find(self, number: int) -> VersionEntry | None:
        """The entry of a version that is part of history, or that is retired and whose objects may still exist.

        None for any other version.
        """

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
        """Whether a number was assigned and is no longer in use: its version failed, or was deleted and its entry
        removed.

        This is permanent, so writers and readers do not use objects under such a number.
        """
        given = number < self.head.next_version and number not in self.head.open
        return given and self.find(number) is None

    def newest(self, limit: int, below: int | None = None) -> list[VersionEntry]:
        """The ``limit`` highest versions that are part of history, in descending order.

        If ``below`` is given, only lower numbers count.
        """
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
        """All retired versions, by number in ascending order. Reads only nodes with retired versions below them."""
        found = self._ask(lambda head: list(self._descending(head, None, lambda ref: ref.retired > 0)))
        return {entry.number: entry for entry in reversed(found) if entry.retired}

    def nbytes(self, known: Cache[int]) -> int:
        """Bytes of the weights of all durable and open versions, and of retired versions whose objects may still exist.

        Args:
            known: cache of the bytes below nodes of the tree; see `history_tree.nbytes`.
        """

        def ask(head: Head) -> int:
            there = history_tree.nbytes(head.root, self._load, known)
            changed = (history_tree.find(head.root, n, self._load) for n in (*head.recent, *head.removed))
            there -= sum(entry.nbytes for entry in changed if entry is not None)
            there += sum(entry.nbytes for entry in head.recent.values())
            return there + sum(entry.nbytes for entry in head.open.values())

        return self._ask(ask)

    def _descending(self, head: Head, below: int | None, wanted: Callable[[NodeRef], bool]) -> Iterator[VersionEntry]:
        """Entries of the head and, for all other numbers, of the tree, in descending order."""
        tree = history_tree.descending(head.root, self._load, below, wanted)
        rest = (entry for entry in tree if head.in_tree(entry.number))
        ahead: VersionEntry | None = None
        bound = 0 if head.root is None else head.root.last  # highest number that the tree may still yield
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
    """A head with the same history that itself contains at most ``most`` entries and removals.

    Args:
        head: the head to be written next, with its generation.
        load: reads a node.
        most: maximum number of entries and removals in the head.

    Returns:
        The head, and the nodes to be written before it, by name.
    """
    if len(head.recent) + len(head.removed) <= most:
        return head, {}
    kept = set(sorted(head.recent, reverse=True)[: most // 2])
    moved: dict[int, VersionEntry | None] = dict.fromkeys(head.removed)
    moved |= {number: entry for number, entry in head.recent.items() if number not in kept}
    edit = history_tree.edited(head.root, moved, load, head.generation)
    after = replace(head, root=edit.root, removed=frozenset(), recent={number: head.recent[number] for number in kept})
    return after, edit.nodes


def unreachable(head: Head, nodes: Mapping[str, int], load: Load) -> set[str]:
    """The nodes that are reachable neither from this head nor from any later head.

    Args:
        head: the model's head.
        nodes: generations of nodes, by name.
        load: reads a node.
    """
    return _not_below(head.root, head.generation, nodes, load)


def unreachable_since_mark(head: Head, nodes: Mapping[str, int], load: Load) -> set[str]:
    """The nodes that were already unreachable when the mark was made; empty without a mark."""
    if head.mark is None:
        return set()
    return _not_below(head.mark.root, head.mark.generation, nodes, load)


def _not_below(root: NodeRef | None, generation: int, nodes: Mapping[str, int], load: Load) -> set[str]:
    old: Collection[str] = {name for name, written in nodes.items() if written <= generation}
    return set(old) - history_tree.names(root, load) if old else set()
