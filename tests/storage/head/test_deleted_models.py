"""Deleted models: gone with one write, their numbers never given again, and nothing left once readers are done."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.heads import open_version, text_of
from weighbridge._core.resources import Retention
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import (
    ModelName,
    files_id_of,
    first_version_of,
    layout_key,
    node_of_key,
    numbered_key,
    registered_files_of,
    version_key,
)
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head import Deletion, Head
from weighbridge_storage.head.head_changes import delete_model, publish, register
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.leases import Grace, write_lease
from weighbridge_storage.head.open_versions import claim_version, give_up_version
from weighbridge_storage.stores.objects import ObjectStore

SMOL = ModelName("acme", "smol")
GRACE = Grace(1000)
FEW = 3
"""Most entries of a head: the rest is in a tree."""


class Bench:
    """A model in a store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.heads = HeadStore(store, most_recent=FEW)
        self.now_ms = 1_000_000
        self.register("f")

    def register(self, files_id: str) -> None:
        self.store.put(f"{SMOL.prefix}files/{files_id}/config.json", b"{}", mode="overwrite")
        self.store.put(layout_key(SMOL, "d", first_version_of(files_id)), b"l", mode="overwrite")
        self.heads.update(SMOL, lambda head: (register(head, files_id, {"k": 1}), None), create=True)

    def open(self) -> int:
        def change(head: Head) -> tuple[Head, int]:
            head, entry = open_version(
                head,
                request_id=f"q{head.next_version}",
                step=1,
                run="r",
                ranks=1,
                now_ms=self.now_ms,
                lease_ms=500,
            )
            return claim_version(head, entry.number, "w"), entry.number

        return self.heads.update(SMOL, change)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            number = self.open()
            self.store.put(version_key(SMOL, number, "model.safetensors"), b"x", mode="create")
            entry = VersionEntry(number, 1, "r", self.now_ms, 1, 1, "f", "w")
            self.heads.edit(SMOL, lambda history, entry=entry: (publish(history, entry), None))

    def delete(self) -> None:
        self.heads.update(SMOL, lambda head: (delete_model(head, self.now_ms), None))

    def collect(self) -> set[int]:
        """Collect as a service that has just been started; returns the numbers of versions that still have objects."""
        heads = HeadStore(self.store, most_recent=FEW)
        collect(self.store, heads, SMOL, grace=GRACE, clock=lambda: self.now_ms)
        return {place[1] for key in self.listed() if (place := numbered_key(SMOL, key)) and place[0] == "versions"}

    def listed(self) -> list[str]:
        return list(self.store.list(SMOL.prefix))


@pytest.fixture
def bench(store: ObjectStore) -> Bench:
    return Bench(store)


def test_a_deleted_model_is_gone_at_once_and_its_objects_when_nobody_reads_them(bench: Bench) -> None:
    bench.add(7)
    assert any(node_of_key(SMOL, key) for key in bench.listed()), "part of the history is in a tree"
    write_lease(bench.store, SMOL, 2, "reader", bench.now_ms + 5 * GRACE.ms)
    bench.delete()
    assert bench.heads.read(SMOL) is None
    assert bench.heads.history(SMOL) is None
    with pytest.raises(NotFound):
        bench.open()

    assert bench.collect() == set(range(1, 8)), "who is reading goes on"
    bench.now_ms += GRACE.ms
    assert bench.collect() == {2}, "and who has a lease does so after the grace time"
    bench.now_ms += 6 * GRACE.ms
    for _ in range(2):  # the nodes of the tree have a grace time of their own
        assert bench.collect() == set()
        bench.now_ms += 2 * GRACE.ms
    assert bench.listed() == [SMOL.head_key]


def test_a_name_that_is_registered_again_goes_on_with_its_numbers_and_has_files_of_its_own(
    bench: Bench,
) -> None:
    bench.add(2)
    bench.delete()
    left = bench.heads.read_any(SMOL)
    assert left is not None
    assert left[0].first_version == 3
    bench.register(files_id_of(3, "f"))
    bench.add()
    history = bench.heads.history(SMOL)
    assert history is not None
    assert list(history.versions()) == [3]
    assert (history.head.retention, history.head.ref_numbers) == (Retention(), {"latest": 3})
    bench.now_ms += GRACE.ms
    assert bench.collect() == {3}
    files = [key for key in bench.listed() if registered_files_of(SMOL, key) is not None]
    assert files == [f"{SMOL.prefix}files/3-f/config.json", f"{SMOL.prefix}layouts/3-d"]

    bench.delete()  # once more
    bench.now_ms += GRACE.ms
    assert bench.collect() == set()
    assert bench.listed() == [SMOL.head_key]


def test_a_model_that_is_being_pushed_to_is_not_deleted(bench: Bench) -> None:
    number = bench.open()
    with pytest.raises(FailedPrecondition, match=r"being received: 1\b"):
        bench.delete()
    bench.heads.update(SMOL, lambda head: (give_up_version(head, number, "no more", bench.now_ms), None))
    bench.delete()
    left = bench.heads.read_any(SMOL)
    assert left is not None
    assert (left[0].open, left[0].next_version) == ({}, number + 1)


def test_a_release_that_does_not_know_deletion_refuses_the_model_from_then_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add()
    bench.delete()
    for registered in (False, True):  # that release would write new files where collections delete old ones
        if registered:
            bench.register(files_id_of(2, "f"))
        with monkeypatch.context() as patch:
            patch.setattr("weighbridge_storage.head.head.FEATURES", frozenset())
            with pytest.raises(FailedPrecondition, match="requires 'deleted'"):
                HeadStore(bench.store).read_any(SMOL)


def test_a_head_says_when_it_was_deleted_and_others_say_nothing() -> None:
    deleted = delete_model(Head(generation=3, next_version=5, files_id="f", extra={"new": 1}), 17)
    deleted = replace(deleted, generation=4)
    assert Head.from_json(deleted.to_json()) == deleted
    assert (deleted.deletion, deleted.deleted, deleted.extra) == (Deletion(17, 5, "", 0), True, {"new": 1})
    before = Head(generation=1)
    assert "deletion" not in json.loads(before.to_json())
    assert Head.from_json(text_of(json.loads(before.to_json()))).first_version == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"deletion": Deletion(1, 6, "", 0)},
        {"deletion": Deletion(1, 4, "", 0)},
        {
            "files_id": "f",
            "deletion": Deletion(1, 5, "", 0),
            "recent": {4: VersionEntry(4, 1, "r", 1, 1, 1, "f", "w")},
        },
    ],
)
def test_a_head_that_has_what_was_deleted_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Head(next_version=5, **wrong)  # type: ignore[arg-type]


def test_deletion_and_change_take_turns(bench: Bench) -> None:
    def change(head: Head) -> tuple[Head, None]:
        if not head.deleted and head.generation == 1:
            HeadStore(bench.store).update(SMOL, lambda h: (delete_model(h, 1), None))
        return replace(head, retention=Retention(keep_last=1)), None

    with pytest.raises(NotFound):
        bench.heads.update(SMOL, change)
    left = bench.heads.read_any(SMOL)
    assert left is not None
    assert left[0].retention == Retention()
