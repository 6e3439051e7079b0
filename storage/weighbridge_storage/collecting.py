"""How are versions that are no longer kept deleted, and what nobody can use any more swept away?

A collection is a few steps, each of which may be done by several replicas at a time, be broken off anywhere, and be done again:

1. List what lies in the model's numbered folders, without the files of versions that are part of history.
2. One change of the head: abandoned open versions are given up, and versions that the retention does not keep get tombstones. From
   then on lists and refs do not have them.
3. Delete the objects of versions whose tombstones are older than the grace time, if no reader has a lease (`leases`), and then the
   tombstones. A version's manifest goes first and stays away: wherever there is one, the folder is complete.
4. Delete what lies under numbers that stand for nothing. They never will again: a number is given once, and nobody can publish what
   was given up. A writer that was stalled meanwhile may still put objects there; the next collection finds them.
5. Remove what is left of uploads under numbers that are not open any more, and of any upload of the model that is older than a day.

The list is one for the whole model and not one for each folder: some servers go on naming folders in which nothing is left.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Collection as AnyCollection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weighbridge.collection import MOST_PROBLEMS, Collection, DeletedVersion, SweptVersion, WaitingVersion
from weighbridge.errors import NotFound, Unavailable, WeighbridgeError
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import forget_versions
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.leases import Grace, ReadLease, read_lease
from weighbridge_storage.names import MANIFEST_FILE, ModelName, numbered_key, version_key
from weighbridge_storage.objects import ObjectStore
from weighbridge_storage.retention import Decision, retire

_DELETIONS = 8
"""Requests at a time."""
_VERSIONS_AT_ONCE = 32
"""Versions whose tombstones go with one change of the head."""
_OLD_UPLOAD_S = 86_400.0


def collect(
    store: ObjectStore,
    heads: HeadStore,
    model: ModelName,
    *,
    grace: Grace,
    clock: Callable[[], int],
    dry_run: bool = False,
    stopping: Callable[[], bool] = lambda: False,
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
    listed = run.list_objects()
    given_up, decision, head = run.retire(clock)
    leases = run.leases({number: keys for number, keys in listed.items() if not head.is_gone(number)})
    waiting, due = _waiting_and_due(head, leases, grace, now_ms)
    deleted = run.delete_versions(head, due, listed)
    swept = run.sweep(head, listed)
    left_behind = [lease.key for lease in leases if grace.is_left_behind(lease, now_ms)]
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
        uploads_discarded=run.discard_uploads(head),
        problems=tuple(run.problems[:MOST_PROBLEMS]),
    )


def _waiting_and_due(
    head: Head, leases: Iterable[ReadLease], grace: Grace, now_ms: int
) -> tuple[tuple[WaitingVersion, ...], list[int]]:
    """Retired versions whose objects must stay, and those whose objects can go."""
    held: defaultdict[int, list[int]] = defaultdict(list)
    for lease in leases:
        if grace.holds(lease, now_ms):
            held[lease.number].append(lease.until_ms)
    waiting, due = [], []
    for number, tombstone in sorted(head.tombstones.items()):
        end_ms = tombstone.deleted_ms + grace.ms
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
        self._unreadable: set[int] = set()
        self._lock = threading.Lock()

    def list_objects(self) -> dict[int, list[str]]:
        """Keys in the model's numbered folders, by number, but for the files of versions that are part of history."""
        there = self._read_head().versions
        found: defaultdict[int, list[str]] = defaultdict(list)
        for key in self.store.list(self.model.prefix):
            if self.stopping():
                raise Unavailable(f"collecting {self.model} was broken off", fix="collect again")
            place = numbered_key(self.model, key)
            if place is not None and (place[0] != "versions" or place[1] not in there):
                found[place[1]].append(key)
        return found

    def retire(self, clock: Callable[[], int]) -> tuple[tuple[int, ...], Decision, Head]:
        """Change the head as time and retention want it: what was given up, what was decided, and the head after that."""

        def change(head: Head) -> tuple[Head, tuple[tuple[int, ...], Decision, Head]]:
            # the grace time begins now, however long it took to come here
            after, decision = retire(head, clock())
            return after, (tuple(sorted(head.open.keys() - after.open.keys())), decision, after)

        return change(self._read_head())[1] if self.dry_run else self.heads.update(self.model, change)

    def _read_head(self) -> Head:
        found = self.heads.read(self.model)
        if found is None:
            raise NotFound(f"there is no model {self.model}", fix="register it first")
        return found[0]

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
                    self._unreadable.add(number)
                    self._failed(error)
                    continue
                if lease is not None:
                    found.append(lease)
        return found

    def delete_versions(
        self, head: Head, numbers: Sequence[int], listed: dict[int, list[str]]
    ) -> tuple[DeletedVersion, ...]:
        """Delete all objects of retired versions, then their tombstones; gives those whose tombstones this run removed."""
        numbers = [number for number in numbers if number not in self._unreadable]
        done: list[int] = []
        for batch in _batches(numbers, _VERSIONS_AT_ONCE):
            manifests = {version_key(self.model, number, MANIFEST_FILE): number for number in batch}
            gone = {manifests[key] for key in self.delete(manifests)}
            keys = {key: number for number in gone for key in listed.get(number, ()) if key not in manifests}
            left = {keys[key] for key in keys.keys() - self.delete(keys)}
            done += self._forget(head, gone - left)
        return tuple(DeletedVersion(number, head.tombstones[number].version.nbytes) for number in done)

    def _forget(self, head: Head, numbers: AnyCollection[int]) -> list[int]:
        """Remove tombstones; gives the numbers of those that were there."""

        def change(head: Head) -> tuple[Head, list[int]]:
            return forget_versions(head, numbers), sorted(head.tombstones.keys() & set(numbers))

        return change(head)[1] if self.dry_run else self.heads.update(self.model, change)

    def sweep(self, head: Head, listed: dict[int, list[str]]) -> tuple[SweptVersion, ...]:
        """Delete what lies under numbers that stand for nothing, and what was said about versions that are not open any more."""
        rubbish = {
            key: number
            for number, keys in listed.items()
            for key in keys
            if head.is_gone(number)
            or (numbered_key(self.model, key) == ("incoming", number) and number in head.versions)
        }
        counts = Counter(rubbish[key] for key in self.delete(rubbish))
        return tuple(SweptVersion(number, count) for number, count in sorted(counts.items()))

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
