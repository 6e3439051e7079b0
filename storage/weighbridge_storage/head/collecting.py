"""Collection of the objects that a model no longer needs: versions that are not kept, and objects that no reader can
still use.

It consists of steps. Several replicas may run each step concurrently, stop at any point, and repeat it:

1. List the model's numbered folders, without the files of versions that are part of history.
2. Change the head once: abandoned open versions fail, and versions that the retention does not keep are retired. Lists
   and refs no longer
contain them.
3. If no reader has a lease (`leases`), delete the objects of versions that were retired longer ago than the grace time,
   and then their
entries. A version's manifest is deleted first and not written again, because a folder with a manifest counts as
complete.
4. Delete the objects under numbers without a version. Objects under numbers of a deleted model, and its registered
   files and layouts, are
deleted only after the grace time; a version that has a lease stays. These objects are never needed again: a number is
assigned only once, and a failed version cannot be published. A stalled writer may still write objects there; the next
collection finds them.
5. Remove unfinished uploads under numbers that are no longer open, and all unfinished uploads of the model that are
   older than a day.
6. Delete unreachable nodes of the history. If any exist, a **mark** records the root and the time. Once the mark is
   older than the grace
time, the collection deletes the nodes that were unreachable when the mark was made, and makes the next mark. A reader
with a head older than the mark had the grace time to read these nodes; later it reads a newer head.

The model is listed as a whole instead of folder by folder, because some servers continue to list empty folders.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
"""Number of concurrent requests."""
_VERSIONS_AT_ONCE = 32
"""Number of versions whose entries are removed with one change of the head."""
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
    present: Callable[[], Container[int]] = frozenset,
) -> Collection:
    """Apply a model's retention, and delete objects that it no longer needs.

    Args:
        store: store of its versions.
        heads: the heads in that store.
        model: the model.
        grace: time for which objects of retired versions stay; the same for all replicas.
        clock: returns the time in milliseconds since 1970 UTC.
        dry_run: only report the actions; nothing is written.
        stopping: polled; if it returns true, the next collection does the rest.
        served: returns the names of the engines that serve each version, by its number.
        present: returns the numbers of versions that the calling process has, and renews itself.

    Returns:
        Report of the collection. It lists deletions that failed; all others succeeded.

    Raises:
        NotFound: the model does not exist.
        Unavailable: ``stopping`` was true before anything could be deleted.
        WeighbridgeError: as `HeadStore.update` and `ObjectStore.list`.
    """
    run = _Run(store, heads, model, dry_run, stopping)
    # before the leases are listed: the leases of a version that is due at this time were written by this time
    now_ms = clock()
    listed, nodes = run.list_objects()
    given_up, decision, history = run.retire(clock, served, present)
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
    """Retired versions whose objects must stay, and numbers of those whose objects can be deleted."""
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
        """List the objects under the model's name.

        Returns:
            The keys in its numbered folders, by number, without the files of versions that are part of history; and the
            generations of the nodes of its history, by name.
        """
        there = self._history().versions()
        found: defaultdict[int, list[str]] = defaultdict(list)
        nodes: dict[str, int] = {}
        for key in self.store.list(self.model.prefix):
            if self.stopping():
                raise Unavailable(f"the collection of {self.model} was interrupted", fix="collect again")
            place, node = numbered_key(self.model, key), node_of_key(self.model, key)
            if node is not None:
                nodes[node[0]] = node[1]
            elif registered_files_of(self.model, key) is not None:
                self._files.append(key)
            elif place is not None and (place[0] != "versions" or place[1] not in there):
                found[place[1]].append(key)
        return found, nodes

    def retire(
        self,
        clock: Callable[[], int],
        served: Callable[[], Mapping[int, Sequence[str]]],
        present: Callable[[], Container[int]],
    ) -> tuple[tuple[int, ...], Decision, History]:
        """Change the head according to time and retention.

        Returns the failed versions, the decision, and the resulting history.
        """

        def change(history: History) -> tuple[Head, tuple[tuple[int, ...], Decision, Head]]:
            # read the clock here: the grace time begins now, regardless of the duration of the earlier steps
            after, decision = retire(history, clock(), served(), present())
            return after, (tuple(sorted(history.head.open.keys() - after.open.keys())), decision, after)

        given_up, decision, after = self._edit(change)
        return given_up, decision, self.heads.history_of(self.model, after)

    def _edit(self, change: Callable[[History], tuple[Head, T]]) -> T:
        """Change the head; in a dry run, only return the result of the change."""
        if self.dry_run:
            return change(self._history())[1]
        return self.heads.edit(self.model, change, deleted=True)

    def _history(self) -> History:
        found = self.heads.history_of_any(self.model)
        if found is None:
            raise NotFound(f"there is no model {self.model}", fix="register it first")
        return found

    def leases(self, listed: dict[int, list[str]]) -> list[ReadLease]:
        """The leases among the keys. An unreadable lease keeps its version until it can be read."""
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
        """Delete all objects of retired versions, then their entries.

        Returns the versions whose entries this run removed.
        """
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
        """Remove the entries of retired versions. Returns the numbers that had an entry."""

        def change(history: History) -> tuple[Head, list[int]]:
            after = forget_versions(history, numbers)
            there = (number for number in sorted(numbers) if history.find(number) is not None)
            return after, list(there)

        return self._edit(change)

    def sweep(
        self, history: History, gone: AnyCollection[int], listed: Mapping[int, list[str]]
    ) -> tuple[SweptVersion, ...]:
        """Delete the objects under numbers without a version, and the incoming state of versions that are no longer
        open.
        """
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
        """Delete files that were registered, and layouts that were declared, before a model of this name was deleted.

        Files and layouts of the current registration have other keys, even if they are equal. Writers no longer use the
        old keys.
        """
        self.delete(key for key in self._files if (registered_files_of(self.model, key) or 0) < below)

    def sweep_nodes(self, nodes: Mapping[str, int], grace: Grace, clock: Callable[[], int]) -> None:
        """Delete nodes of the history that were unreachable for the grace time.

        Mark the current root if other nodes are unreachable now.
        """
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
        """Remove unfinished uploads under numbers that are no longer open, and old uploads."""
        if self.dry_run or self.stopping():
            return 0

        def is_dead(key: str) -> bool:
            # a later attempt than this unfinished upload made the version durable
            place = numbered_key(self.model, key)
            return place is not None and place[1] < head.next_version and place[1] not in head.open

        try:
            gone = self.store.discard_unfinished(self.model.prefix, 0.0, only=is_dead)
            return gone + self.store.discard_unfinished(self.model.prefix, _OLD_UPLOAD_S)
        except WeighbridgeError as error:
            self._failed(error)
            return 0

    def delete(self, keys: Iterable[str]) -> set[str]:
        """Delete objects concurrently. Returns the keys whose objects no longer exist; in a dry run, all keys."""

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
