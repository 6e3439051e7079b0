"""Collection of what a model no longer needs: versions that are not kept, and what nobody can use any more.

It is a few steps, each of which may be done by several replicas at a time, be broken off anywhere, and be done again:

1. List what lies in the model's numbered folders, without the files of versions that are part of history.
2. One change of the head: abandoned open versions are given up, and versions that the retention does not keep are retired. From
   then on lists and refs do not have them.
3. Delete the objects of versions that were retired longer ago than the grace time, if no reader has a lease (`leases`), and then
   their entries. A version's manifest goes first and stays away: wherever there is one, the folder is complete.
4. Delete what lies under numbers that stand for nothing; under those of a model that was deleted only once the grace time is over and no
   reader has a lease, and the files and layouts that were registered with it. They never will again: a number is given once, and nobody can publish what
   was given up. A writer that was stalled meanwhile may still put objects there; the next collection finds them.
5. Remove what is left of uploads under numbers that are not open any more, and of any upload of the model that is older than a day.
6. Delete nodes of the history that nobody needs any more. Where some are below no root, a **mark** notes the root and the time; once it
   is older than the grace time, those go that were below no root by then, and the next mark is made. Whoever reads with a head that is
   older than that has had the grace time for it, and finds the rest with a newer head.

The list is one for the whole model and not one for each folder: some servers go on naming folders in which nothing is left.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Collection as AnyCollection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weighbridge._core.reports.collection import (
    MOST_PROBLEMS,
    Collection,
    DeletedVersion,
    SweptVersion,
    WaitingVersion,
)
from weighbridge.errors import NotFound, Unavailable, WeighbridgeError
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import (
    MANIFEST_FILE,
    ModelName,
    node_key,
    node_of_key,
    numbered_key,
    registered_files_of,
    version_key,
)
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import forget_versions, mark_history
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History, NodeMissing, unreachable, unreachable_since_mark
from weighbridge_storage.head.leases import Grace, ReadLease, read_lease
from weighbridge_storage.head.retention import NOBODY, Decision, retire
from weighbridge_storage.stores.objects import ObjectStore

_DELETIONS = 8
"""Requests at a time."""
_VERSIONS_AT_ONCE = 32
"""Versions whose entries go with one change of the head."""
_OLD_UPLOAD_S = 86_400.0

T = TypeVar("T")


def collect(
    store: ObjectStore,
    heads: HeadStore,
    model: ModelName,
    *,
    grace: Grace,
    clock: Callable[[], int],
    dry_run: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    served: Callable[[], Mapping[int, Sequence[str]]] = lambda: NOBODY,
) -> Collection:
    """Carry a model's retention out.

    Args:
        store: where its versions lie.
        heads: the heads in that store.
        model: which model.
        grace: how long objects of retired versions stay; the same for all replicas.
        clock: gives the time in milliseconds since 1970 UTC.
        dry_run: only say what would be done; nothing is written.
        stopping: is asked again and again; if it says so, the rest is left to the next collection.
        served: says which engines serve which versions, by number.

    Returns:
        What was done. Deletions that failed are in it; the others were done nevertheless.

    Raises:
        NotFound: there is no such model.
        Unavailable: it was to stop before it could delete anything.
        WeighbridgeError: as `HeadStore.update` and `ObjectStore.list`.
    """
    run = _Run(store, heads, model, dry_run, stopping)
    # before the leases are listed: what is due by then had leases by then
    now_ms = clock()
    listed, nodes = run.list_objects()
    given_up, decision, history = run.retire(clock, served)
    gone = {number for number in listed if history.is_gone(number)}
    deletion = history.head.deletion
    with_model = {number for number in gone if deletion is not None and number < deletion.below}
    leases = run.leases({n: keys for n, keys in listed.items() if n in with_model or n not in gone})
    if deletion is not None:
        held = {lease.number for lease in leases if grace.holds(lease, now_ms)} | run.unreadable
        gone -= with_model if now_ms < deletion.deleted_ms + grace.ms else with_model & held
        run.sweep_files(deletion.below)
    retired = history.retired()
    waiting, due = _waiting_and_due(retired, leases, grace, now_ms)
    deleted = run.delete_versions({number: retired[number] for number in due}, listed)
    swept = run.sweep(history, gone, listed)
    left_behind = [lease.key for lease in leases if grace.is_left_behind(lease, now_ms)]
    run.sweep_nodes(nodes, grace, clock)
    return Collection(
        model=str(model),
        dry_run=dry_run,
        kept=decision.kept,
        retired=decision.retired,
        waiting=waiting,
        deleted=deleted,
        given_up=given_up,
        swept=swept,
        leases_removed=len(run.delete(left_behind)),
        uploads_discarded=run.discard_uploads(history.head),
        problems=tuple(run.problems[:MOST_PROBLEMS]),
    )


def _waiting_and_due(
    retired: Mapping[int, VersionEntry], leases: Iterable[ReadLease], grace: Grace, now_ms: int
) -> tuple[tuple[WaitingVersion, ...], list[int]]:
    """Retired versions whose objects must stay, and those whose objects can go."""
    held: defaultdict[int, list[int]] = defaultdict(list)
    for lease in leases:
        if grace.holds(lease, now_ms):
            held[lease.number].append(lease.until_ms)
    waiting, due = [], []
    for number, entry in retired.items():
        end_ms = entry.retired_ms + grace.ms
        if now_ms < end_ms:
            waiting.append(WaitingVersion(number, end_ms, 0))
        elif number in held:
            waiting.append(WaitingVersion(number, max(held[number]) + grace.quarter_ms, len(held[number])))
        else:
            due.append(number)
    return tuple(waiting), due


@dataclass
class _Run:
    """One collection of one model."""

    store: ObjectStore
    heads: HeadStore
    model: ModelName
    dry_run: bool
    stopping: Callable[[], bool]

    def __post_init__(self) -> None:
        self.problems: list[str] = []
        self.unreadable: set[int] = set()
        self._files: list[str] = []
        self._lock = threading.Lock()

    def list_objects(self) -> tuple[dict[int, list[str]], dict[str, int]]:
        """What lies under the model's name.

        Returns:
            The keys in its numbered folders, by number, but for the files of versions that are part of history; and the nodes
            of its history, generation by name.
        """
        there = self._history().versions()
        found: defaultdict[int, list[str]] = defaultdict(list)
        nodes: dict[str, int] = {}
        for key in self.store.list(self.model.prefix):
            if self.stopping():
                raise Unavailable(f"collecting {self.model} was broken off", fix="collect again")
            place, node = numbered_key(self.model, key), node_of_key(self.model, key)
            if node is not None:
                nodes[node[0]] = node[1]
            elif registered_files_of(self.model, key) is not None:
                self._files.append(key)
            elif place is not None and (place[0] != "versions" or place[1] not in there):
                found[place[1]].append(key)
        return found, nodes

    def retire(
        self, clock: Callable[[], int], served: Callable[[], Mapping[int, Sequence[str]]]
    ) -> tuple[tuple[int, ...], Decision, History]:
        """Change the head as time and retention want it: what was given up, what was decided, and the history after that."""

        def change(history: History) -> tuple[Head, tuple[tuple[int, ...], Decision, Head]]:
            # the grace time begins now, however long it took to come here
            after, decision = retire(history, clock(), served())
            return after, (tuple(sorted(history.head.open.keys() - after.open.keys())), decision, after)

        given_up, decision, after = self._edit(change)
        return given_up, decision, self.heads.history_of(self.model, after)

    def _edit(self, change: Callable[[History], tuple[Head, T]]) -> T:
        """Change the head; in a dry run, as if it were so."""
        if self.dry_run:
            return change(self._history())[1]
        return self.heads.edit(self.model, change, deleted=True)

    def _history(self) -> History:
        found = self.heads.history_of_any(self.model)
        if found is None:
            raise NotFound(f"there is no model {self.model}", fix="register it first")
        return found

    def leases(self, listed: dict[int, list[str]]) -> list[ReadLease]:
        """The leases among the keys. One that cannot be read keeps its version until it can."""
        found = []
        for number, keys in listed.items():
            for key in keys:
                if numbered_key(self.model, key) != ("leases", number):
                    continue
                try:
                    lease = read_lease(self.store, self.model, key)
                except WeighbridgeError as error:
                    self.unreadable.add(number)
                    self._failed(error)
                    continue
                if lease is not None:
                    found.append(lease)
        return found

    def delete_versions(
        self, due: Mapping[int, VersionEntry], listed: Mapping[int, list[str]]
    ) -> tuple[DeletedVersion, ...]:
        """Delete all objects of retired versions, then their entries; gives those whose entries this run removed."""
        numbers = [number for number in due if number not in self.unreadable]
        done: list[int] = []
        for batch in _batches(numbers, _VERSIONS_AT_ONCE):
            manifests = {version_key(self.model, number, MANIFEST_FILE): number for number in batch}
            gone = {manifests[key] for key in self.delete(manifests)}
            keys = {key: number for number in gone for key in listed.get(number, ()) if key not in manifests}
            left = {keys[key] for key in keys.keys() - self.delete(keys)}
            done += self._forget(gone - left)
        return tuple(DeletedVersion(number, due[number].nbytes) for number in done)

    def _forget(self, numbers: AnyCollection[int]) -> list[int]:
        """Remove the entries of retired versions; gives the numbers of those that were there."""

        def change(history: History) -> tuple[Head, list[int]]:
            after = forget_versions(history, numbers)
            there = (number for number in sorted(numbers) if history.find(number) is not None)
            return after, list(there)

        return self._edit(change)

    def sweep(
        self, history: History, gone: AnyCollection[int], listed: Mapping[int, list[str]]
    ) -> tuple[SweptVersion, ...]:
        """Delete what lies under numbers that stand for nothing, and what was said about versions that are not open any more."""
        rubbish = {
            key: number
            for number, keys in listed.items()
            for key in keys
            if number in gone
            or (numbered_key(self.model, key) == ("incoming", number) and history.durable(number) is not None)
        }
        counts = Counter(rubbish[key] for key in self.delete(rubbish))
        return tuple(SweptVersion(number, count) for number, count in sorted(counts.items()))

    def sweep_files(self, below: int) -> None:
        """Delete the files that were registered with a model of this name before it was deleted, and the layouts that were declared.

        Those that are registered since have another key, also if they are the same: nobody is about to write to these.
        """
        self.delete(key for key in self._files if (registered_files_of(self.model, key) or 0) < below)

    def sweep_nodes(self, nodes: Mapping[str, int], grace: Grace, clock: Callable[[], int]) -> None:
        """Delete nodes of the history that have been below no root for the grace time, and mark the present root if others will be."""
        if self.dry_run or not nodes:
            return
        head = self._history().head
        if head.mark is not None and clock() < head.mark.marked_ms + grace.ms:
            return
        load = partial(self.heads.load_node, self.model)
        try:
            dead = unreachable_since_mark(head, nodes, load)
            waiting = unreachable(head, nodes, load) - dead
        except NodeMissing:
            return  # another collection is ahead of this one
        self.delete(node_key(self.model, name) for name in dead)
        if waiting:
            self.heads.update(self.model, lambda head: (mark_history(head, clock()), None), deleted=True)

    def discard_uploads(self, head: Head) -> int:
        """Remove what is left of uploads under numbers that are not open any more, and of old ones."""
        if self.dry_run or self.stopping():
            return 0

        def is_dead(key: str) -> bool:
            # what became durable was uploaded by an attempt after this one
            place = numbered_key(self.model, key)
            return place is not None and place[1] < head.next_version and place[1] not in head.open

        try:
            gone = self.store.discard_unfinished(self.model.prefix, 0.0, only=is_dead)
            return gone + self.store.discard_unfinished(self.model.prefix, _OLD_UPLOAD_S)
        except WeighbridgeError as error:
            self._failed(error)
            return 0

    def delete(self, keys: Iterable[str]) -> set[str]:
        """Delete objects side by side; gives the keys at which there is none any more. In a dry run, as if it were so."""

        def delete(key: str) -> bool:
            if not self.dry_run:
                if self.stopping():
                    return False
                try:
                    self.store.delete(key)
                except WeighbridgeError as error:
                    self._failed(error)
                    return False
            return True

        keys = list(keys)
        with ThreadPoolExecutor(_DELETIONS, thread_name_prefix="delete") as pool:
            return {key for key, done in zip(keys, pool.map(delete, keys), strict=True) if done}

    def _failed(self, error: WeighbridgeError) -> None:
        with self._lock:
            self.problems.append(error.message)


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))
