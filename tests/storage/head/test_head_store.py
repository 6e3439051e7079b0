"""Is a change of a head made exactly once, with concurrent writers and whatever the store answers?"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest

from tests.support.forked import forked_python
from tests.support.heads import (
    allocate,
    published,
    stored,
    text_of,
)
from weighbridge.errors import (
    Conflict,
    DeadlineExceeded,
    NotFound,
    Unavailable,
)
from weighbridge_storage.documents import document_digests
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import REMEMBERED_WRITES
from weighbridge_storage.head.head_changes import (
    register,
    set_ref,
)
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.objects import Buffer, ObjectStore, PutMode

SMOL = ModelName("acme", "smol")


def test_a_model_appears_when_it_is_registered(store: ObjectStore) -> None:
    heads = HeadStore(store)
    assert heads.read(SMOL) is None
    assert list(heads.models()) == []
    with pytest.raises(NotFound):
        heads.update(SMOL, allocate)
    heads.update(SMOL, lambda head: (register(head, "f1", {"dtype": "BF16"}), None), create=True)
    found = heads.read(SMOL)
    assert found is not None
    assert (found[0].generation, found[0].registration) == (1, {"dtype": "BF16"})
    heads.update(ModelName("acme", "big"), lambda head: (register(head, "f", {}), None), create=True)
    store.put("models/acme/headless/versions/000000000001/x", b"", mode="create")
    store.put("models/stray.txt", b"", mode="create")
    store.put("models/bad--name/x/head.json", b"", mode="create")
    named = [ModelName("acme", "big"), ModelName("acme", "headless"), SMOL]
    assert list(heads.models()) == named
    assert [model for model in named if heads.read(model) is None] == [named[1]]
    assert list(heads.models("acme/big")) == named[1:]
    assert list(heads.models("acme/c")) == named[1:]
    assert list(heads.models("acmf")) == []


def test_models_that_cannot_be_read_are_named_with_what_to_do(store: ObjectStore) -> None:
    heads = HeadStore(store)
    heads.update(SMOL, lambda head: (register(head, "f", {}), None), create=True)
    assert all(error is None for _, error in heads.examined())
    store.put("models/acme/headless/versions/000000000001/x", b"", mode="create")
    for name, text in (
        ("damaged", store.get(SMOL.head_key)[0].replace(b'"next_version":1', b'"next_version":3')),
        ("earlier", text_of({"format": 2})),
        ("later", text_of({"format": 4})),
    ):
        store.put(ModelName("acme", name).head_key, text, mode="create")
    found = {model.name: error.fix for model, error in heads.examined() if error}
    assert found == {
        "damaged": document_digests.REPAIR,
        "earlier": "use a Weighbridge that reads format 2",
        "later": "use a Weighbridge that reads format 4",
    }


def test_a_head_counts_as_read_lately_until_it_is_old_or_one_was_written_here(store: ObjectStore) -> None:
    heads, others = HeadStore(store), HeadStore(store)
    assert heads.read_lately(SMOL, 60.0) is None
    heads.update(SMOL, allocate, create=True)
    assert heads.read_lately(SMOL, 60.0) is None
    found = heads.read(SMOL)
    assert found is not None
    assert heads.read_lately(SMOL, 60.0) is found[0]
    assert heads.read_lately(SMOL, 0.0) is None
    others.update(SMOL, allocate)
    assert heads.read_lately(SMOL, 60.0) is found[0]
    heads.update(SMOL, allocate)
    assert heads.read_lately(SMOL, 60.0) is None
    assert heads.read(SMOL) == others.read(SMOL)


def test_a_reading_that_ends_late_with_an_older_head_is_not_what_is_remembered(store: ObjectStore) -> None:
    class Late:
        """The store; a reading that has begun may be held back."""

        def __init__(self) -> None:
            self.read, self.go_on = threading.Event(), threading.Event()
            self.holds = False

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> tuple[bytes, str]:
            found = store.get(key)
            if self.holds:
                self.holds = False
                self.read.set()
                self.go_on.wait(60)
            return found

    late = Late()
    heads = HeadStore(cast("ObjectStore", late))
    heads.update(SMOL, allocate, create=True)
    late.holds = True
    reading = threading.Thread(target=heads.read, args=(SMOL,))
    reading.start()
    late.read.wait(60)
    HeadStore(store).update(SMOL, allocate)
    newer = heads.read(SMOL)
    late.go_on.set()
    reading.join()
    assert newer is not None
    assert heads.last_read(SMOL) is newer[0]


def test_a_head_that_is_gone_is_not_remembered(store: ObjectStore) -> None:
    heads = HeadStore(store)
    heads.update(SMOL, allocate, create=True)
    assert heads.read(SMOL) is not None
    store.delete(SMOL.head_key)
    assert heads.read(SMOL) is None
    assert heads.last_read(SMOL) is None
    assert heads.read_lately(SMOL, 60.0) is None


def test_a_change_that_changes_nothing_writes_nothing(store: ObjectStore) -> None:
    heads = HeadStore(store)
    heads.update(SMOL, allocate, create=True)
    before = store.get(SMOL.head_key)
    assert heads.update(SMOL, lambda head: (head, "result")) == "result"
    assert store.get(SMOL.head_key) == before


def test_what_a_change_raises_ends_the_update(store: ObjectStore) -> None:
    heads = HeadStore(store)
    heads.update(SMOL, allocate, create=True)
    before = store.get(SMOL.head_key)
    with pytest.raises(NotFound):
        heads.edit(SMOL, lambda history: (set_ref(history, "prod", 1), None))
    assert store.get(SMOL.head_key) == before


UPDATE = """
import sys
from tests.support.heads import allocate
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import MOST_RECENT, History
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.opening import open_store
heads = HeadStore(open_store(sys.argv[1]), patience_s=120)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    print(heads.update(ModelName("acme", "smol"), allocate, create=True))
"""


@pytest.mark.process
def test_updates_by_several_processes_each_land_exactly_once(store: ObjectStore, location: str) -> None:
    # SeaweedFS makes those who race for one name wait
    processes, each = 8, 5 if location.startswith("s3:") else 20
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(forked_python("-c", UPDATE, location, str(each))) for _ in range(processes)]
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        numbers = []
        for writer in writers:
            own = [int(line) for line in writer.stdout]
            assert writer.wait(100) == 0
            assert own == sorted(own)
            numbers += own
    assert sorted(numbers) == list(range(1, processes * each + 1))
    found = HeadStore(store).read(SMOL)
    assert found is not None
    assert (found[0].generation, found[0].next_version) == (processes * each, processes * each + 1)


class LyingStore(ObjectStore):
    """A store whose responses go wrong. ``script`` says how, one word for each put.

    ``ok``; ``refused`` (nothing is written) or ``lost`` (it is written), both with the error given; ``late`` (an error,
    and it is written before the next put); ``late-read`` (an error, and it is written after the next read).
    """

    def __init__(self, inner: ObjectStore, script: list[str], error: type[Exception]) -> None:
        self.inner, self.script, self.error = inner, script, error
        self.late: list[tuple[str, bytes, PutMode]] = []
        self.after_read: list[tuple[str, bytes, PutMode]] = []
        self.unreadable = 0
        self.others = 0

    def get(self, key: str) -> tuple[bytes, str]:
        if self.unreadable:
            self.unreadable -= 1
            raise Unavailable("no answer")
        found = self.inner.get(key)
        self._deliver(self.after_read)
        return found

    def _deliver(self, writes: list[tuple[str, bytes, PutMode]]) -> None:
        while writes:
            key, data, mode = writes.pop()
            with contextlib.suppress(Conflict):
                self.inner.put(key, data, mode=mode)

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        assert isinstance(data, bytes)
        self._deliver(self.late)
        word = self.script.pop(0) if self.script else "ok"
        if word == "ok":
            return self.inner.put(key, data, mode=mode)
        if word == "lost":
            self.inner.put(key, data, mode=mode)
        elif word == "lost-then-others":
            self.inner.put(key, data, mode=mode)
            for _ in range(5):
                HeadStore(self.inner).update(SMOL, allocate)
                self.others += 1
        elif word == "lost-then-many-others":
            self.inner.put(key, data, mode=mode)
            for _ in range(REMEMBERED_WRITES + 1):
                HeadStore(self.inner).update(SMOL, allocate)
        elif word == "late":
            self.late.append((key, data, mode))
        elif word == "late-read":
            self.after_read.append((key, data, mode))
        raise self.error("the response went wrong")

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def modified_ms(self, key: str) -> int:
        return self.inner.modified_ms(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.read_range(key, start, length)

    def open(self, key: str) -> Any:
        return self.inner.open(key)

    def stream(self, key: str) -> Iterator[bytes | memoryview]:
        return self.inner.stream(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self.inner.list(prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        return self.inner.folders(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def copy(self, source: str, target: str) -> None:
        self.inner.copy(source, target)

    def discard_unfinished(self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None) -> int:
        return self.inner.discard_unfinished(prefix, older_than_s, only=only)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("error", [Conflict, Unavailable, DeadlineExceeded])
@pytest.mark.parametrize(
    "script",
    [
        ["lost"],
        ["refused"],
        ["refused", "refused", "lost"],
        ["lost-then-others"],
        ["late"],
        ["late", "late", "late"],
        ["late-read"],
        ["late-read", "late", "refused", "lost-then-others"],
        ["refused", "late", "lost-then-others"],
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_change_is_made_once_whatever_the_responses_say(
    store: ObjectStore, script: list[str], error: type[Exception], exists: bool
) -> None:
    honest = HeadStore(store)
    if exists:
        honest.update(SMOL, allocate, create=True)
    lying = LyingStore(store, list(script), error)
    before = int(exists)
    number = HeadStore(lying).update(SMOL, allocate, create=True)
    lying._deliver(lying.late)
    lying._deliver(lying.after_read)
    found = honest.read(SMOL)
    assert found is not None
    assert found[0].next_version - 1 == before + 1 + lying.others
    assert number == before + 1
    lying.script = []
    again = HeadStore(lying).update(SMOL, allocate)
    assert again == before + lying.others + 2


def test_a_change_whose_fate_is_forgotten_is_reported_as_unknown(store: ObjectStore) -> None:
    HeadStore(store).update(SMOL, allocate, create=True)
    lying = LyingStore(store, ["lost-then-many-others"], Unavailable)
    with pytest.raises(DeadlineExceeded, match="outcome is unknown"):
        HeadStore(lying).update(SMOL, allocate)
    found = HeadStore(store).read(SMOL)
    assert found is not None
    assert found[0].next_version == 1 + 1 + 1 + REMEMBERED_WRITES + 1


def test_a_conflict_leaves_no_doubt_however_often_others_change_the_head(store: ObjectStore) -> None:
    HeadStore(store).update(SMOL, allocate, create=True)

    class Crowded(LyingStore):
        def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
            while self.script:
                files_id = self.script.pop()
                HeadStore(store).update(SMOL, lambda head: (register(head, files_id, {}), None))  # noqa: B023
            return self.inner.put(key, data, mode=mode)

    others = [str(number) for number in range(REMEMBERED_WRITES + 3)]
    assert HeadStore(Crowded(store, others, Conflict)).update(SMOL, allocate) == 2


def test_reads_that_fail_after_a_lost_response_are_repeated(store: ObjectStore) -> None:
    HeadStore(store).update(SMOL, allocate, create=True)
    lying = LyingStore(store, ["lost"], Unavailable)
    real_put = lying.put

    def put(key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        lying.unreadable = 4
        return real_put(key, data, mode=mode)

    lying.put = put  # type: ignore[method-assign]
    assert HeadStore(lying).update(SMOL, allocate) == 2


def test_patience_ends(store: ObjectStore) -> None:
    HeadStore(store).update(SMOL, allocate, create=True)
    for error, said in (
        (DeadlineExceeded, "outcome is unknown"),
        (Unavailable, "the response went wrong"),
    ):
        lying = LyingStore(store, ["refused"] * 1000, error)
        with pytest.raises(error, match=said):
            HeadStore(lying, patience_s=0.1).update(SMOL, allocate)

    class Rival(LyingStore):
        def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
            HeadStore(store).update(SMOL, allocate)
            return self.inner.put(key, data, mode=mode)

    with pytest.raises(Conflict):
        HeadStore(Rival(store, [], Conflict), patience_s=0.1).update(SMOL, allocate)


def test_threads_of_one_store_take_turns_too(store: ObjectStore) -> None:
    heads = HeadStore(store)
    heads.update(SMOL, lambda head: (register(head, "f", {}), None), create=True)
    numbers: list[int] = []

    def work() -> None:
        for _ in range(10):
            number = heads.update(SMOL, allocate)
            heads.update(SMOL, lambda head: (published(head, number), None))  # noqa: B023 (called at once)
            numbers.append(number)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stored(store, SMOL)
    assert sorted(numbers) == list(range(1, 61)) == list(found.versions())
    assert found.head.ref_numbers == {"latest": 60}
