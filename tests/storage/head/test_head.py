"""Does a model's head change exactly once per change, only forward, and is a broken one noticed?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.forked import forked_python
from tests.support.heads import Nodes, history, stored, text_of, with_digest
from weighbridge._core.resources import Retention
from weighbridge.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
)
from weighbridge_storage.documents import document_digests
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry
from weighbridge_storage.documents.names import MAX_VERSION, ModelName
from weighbridge_storage.head.head import REMEMBERED_FAILURES, REMEMBERED_WRITES, Head
from weighbridge_storage.head.head_changes import (
    MAX_REFS,
    delete_ref,
    delete_versions,
    forget_versions,
    mark_history,
    publish,
    register,
    set_ref,
    set_retention,
    stamp,
)
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import (
    claim_version,
    give_up_abandoned,
    give_up_version,
    open_version,
    renew_version,
    still_open,
)
from weighbridge_storage.stores.objects import Buffer, ObjectStore, PutMode

SMOL = ModelName("acme", "smol")


def entry(number: int, write_id: str = "w") -> VersionEntry:
    return VersionEntry(
        number=number,
        step=number * 10,
        run="r",
        created_ms=1,
        nbytes=2,
        tensor_count=3,
        files_id="f",
        write_id=f"{write_id}{number}",
    )


def opened(head: Head, request_id: str = "", now_ms: int = 1000) -> tuple[Head, OpenEntry]:
    """The head after a version was opened, by a request of its own unless one is named."""
    return open_version(
        head,
        request_id=request_id or f"request {head.next_version}",
        step=head.next_version * 10,
        run="r",
        ranks=2,
        now_ms=now_ms,
        lease_ms=100,
    )


def allocate(head: Head) -> tuple[Head, int]:
    changed, there = opened(head)
    return changed, there.number


def published(head: Head, number: int) -> Head:
    done = entry(number)
    return publish(history(claim_version(head, number, done.write_id)), done)


def head_with(*numbers: int) -> Head:
    head = Head()
    for _ in range(max(numbers)):
        head, _ = opened(head)
    for number in numbers:
        head = published(head, number)
    for number in list(head.open):
        head = give_up_version(head, number, "not wanted", 1)
    return head


# --- what may change ------------------------------------------------------------------------------------------------


class HeadHistory(RuleBasedStateMachine):
    """Any sequence of changes, compared with a model of plain sets; entries go into the tree at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.nodes = Nodes()
        self.given: list[int] = []
        self.open: dict[int, tuple[str, int]] = {}  # claim and time of each
        self.failed: list[int] = []
        self.forgotten: set[int] = set()
        self.now_ms = 1000
        self.published: set[int] = set()
        self.deleted: set[int] = set()
        self.refs: dict[str, int] = {}
        self.latest_seen: list[int] = []
        self.writes: list[str] = []

    @property
    def history(self) -> History:
        return self.nodes.history(self.head)

    @rule(most=st.integers(0, 4))
    def settle(self, most: int) -> None:
        self.head = self.nodes.settle(self.head, most)
        assert len(self.head.recent) + len(self.head.removed) <= most

    @rule()
    def open_next(self) -> None:
        self.head, there = opened(self.head, now_ms=self.now_ms)
        self.given.append(there.number)
        self.open[there.number] = "", self.now_ms + 100
        assert there.parent == max(self.published, default=0)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        there = self.head.open[data.draw(st.sampled_from(sorted(self.open)))]

        def ask(ranks: int) -> tuple[Head, OpenEntry]:
            return open_version(
                self.head,
                request_id=there.request_id,
                step=there.step,
                run=there.run,
                ranks=ranks,
                now_ms=0,
                lease_ms=0,
            )

        assert ask(there.ranks) == (self.head, there)
        with pytest.raises(InvalidArgument):
            ask(there.ranks + 1)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), claim=st.sampled_from(["w", "other"]))
    def claim_any(self, data: st.DataObject, claim: str) -> None:
        number = data.draw(st.sampled_from(self.given))
        claim = f"{claim}{number}"
        if number not in self.open:
            with pytest.raises(VersionFailed):
                claim_version(self.head, number, claim)
        elif self.open[number][0] not in ("", claim):
            with pytest.raises(AlreadyExists):
                claim_version(self.head, number, claim)
        else:
            self.head = claim_version(self.head, number, claim)
            self.open[number] = claim, self.open[number][1]

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def publish_any(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.given))
        if number in self.published:
            return
        if number not in self.open:
            with pytest.raises(VersionFailed):
                publish(self.history, entry(number))
        elif self.open[number][0] != entry(number).write_id:
            with pytest.raises(AlreadyExists):
                publish(self.history, entry(number))
        else:
            self.head = publish(self.history, entry(number))
            self.published.add(number)
            del self.open[number]

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def publish_again(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.published)))
        assert publish(self.history, entry(number)) == self.head
        with pytest.raises(AlreadyExists):
            publish(self.history, entry(number, "other"))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def give_up_any(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.given))
        before = self.head
        self.head = give_up_version(self.head, number, "line\nline" * 100, self.now_ms)
        if self.open.pop(number, None) is None:
            assert self.head == before
        else:
            self.failed.append(number)
            assert self.head.failed[number].reason.startswith("line line")

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.head = renew_version(self.head, number, self.now_ms + 100)
        self.open[number] = self.open[number][0], self.now_ms + 100

    @rule(passed=st.integers(0, 150))
    def time_passes(self, passed: int) -> None:
        self.now_ms += passed
        self.head = give_up_abandoned(self.head, self.now_ms)
        for number in [n for n, (_, until) in self.open.items() if until < self.now_ms]:
            del self.open[number]
            self.failed.append(number)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.given))
        self.head = forget_versions(self.history, [number])
        if number in self.deleted:
            self.deleted.remove(number)
            self.forgotten.add(number)

    @rule(last=st.integers(0, 5), every=st.integers(0, 5), younger=st.integers(0, 5))
    def retain(self, last: int, every: int, younger: int) -> None:
        self.head = set_retention(self.head, Retention(last, every, younger))
        assert self.head.retention == Retention(last, every, younger)

    @rule(ahead=st.integers(0, 5))
    def publish_what_was_never_opened(self, ahead: int) -> None:
        with pytest.raises(VersionFailed):
            publish(self.history, entry(self.head.next_version + ahead))

    @rule(name=st.sampled_from(["prod", "eval"]), number=st.integers(1, 12))
    def tag(self, name: str, number: int) -> None:
        if number in self.published:
            self.head = set_ref(self.history, name, number)
            self.refs[name] = number
        else:
            with pytest.raises(NotFound):
                set_ref(self.history, name, number)

    @rule(name=st.sampled_from(["prod", "eval"]))
    def untag(self, name: str) -> None:
        if self.refs.pop(name, None) is None:
            with pytest.raises(NotFound):
                delete_ref(self.head, name)
        else:
            self.head = delete_ref(self.head, name)

    @rule(number=st.integers(1, 12))
    def delete(self, number: int) -> None:
        if number in self.deleted:
            assert delete_versions(self.history, [number], 5) == self.head
        elif number in self.open:
            with pytest.raises(FailedPrecondition):
                delete_versions(self.history, [number], 5)
        elif number not in self.published:
            with pytest.raises(NotFound):
                delete_versions(self.history, [number], 5)
        elif number in self.refs.values() or number == max(self.published):
            with pytest.raises(FailedPrecondition):
                delete_versions(self.history, [number], 5)
        else:
            self.head = delete_versions(self.history, [number], 5)
            self.published.remove(number)
            self.deleted.add(number)

    @rule(files_id=st.text("abc", max_size=3), extra=st.dictionaries(st.text(max_size=3), st.integers()))
    def register_again(self, files_id: str, extra: dict[str, int]) -> None:
        self.head = register(self.head, files_id, extra)
        assert (self.head.files_id, self.head.registration) == (files_id, extra)

    @rule()
    def write(self) -> None:
        self.writes.append(f"id{len(self.writes)}")
        self.head = stamp(self.head, self.head, self.writes[-1])

    @invariant()
    def numbers_are_unique_and_increase(self) -> None:
        assert self.given == list(range(1, len(self.given) + 1))

    @invariant()
    def the_head_says_what_happened(self) -> None:
        expected = dict(self.refs)
        if self.published:
            expected["latest"] = max(self.published)
        assert self.head.ref_numbers == expected
        there = self.history
        assert there.versions() == {number: entry(number) for number in self.published}
        retired = {number: dataclasses.replace(entry(number), retired_ms=5) for number in self.deleted}
        assert there.retired() == retired
        assert list(there.versions()) == sorted(self.published)
        newest = sorted(self.published, reverse=True)
        assert [found.number for found in there.newest(2)] == newest[:2]
        below = [number for number in newest if number < 7]
        assert [found.number for found in there.newest(3, 7)] == below[:3]
        assert {n: (there.claim, there.until_ms) for n, there in self.head.open.items()} == self.open
        assert sorted(self.head.failed) == sorted(self.failed[-REMEMBERED_FAILURES:])
        for number in range(1, len(self.given) + 3):
            is_readable = number in self.published or number in self.deleted
            assert (there.find(number) is not None) == is_readable
            assert (there.durable(number) is not None) == (number in self.published)
            stands_for_nothing = number in self.given and not is_readable and number not in self.open
            assert there.is_gone(number) == stands_for_nothing
            if number in self.open:
                assert still_open(self.head, number).number == number
            else:
                with pytest.raises(VersionFailed):
                    still_open(self.head, number)
        assert self.head.generation == len(self.writes)
        assert list(self.head.writes) == self.writes[-REMEMBERED_WRITES:]

    @invariant()
    def latest_never_goes_back(self) -> None:
        self.latest_seen.append(self.head.latest)
        assert self.latest_seen == sorted(self.latest_seen)

    @invariant()
    def it_reads_back_as_it_was_written(self) -> None:
        if self.head.generation:
            assert Head.from_json(self.head.to_json()) == self.head


TestHeadHistory = HeadHistory.TestCase


@pytest.mark.parametrize("name", ["latest", "live", "7", ""])
def test_refs_that_move_by_themselves_cannot_be_moved_by_hand(name: str) -> None:
    with pytest.raises(InvalidArgument):
        set_ref(history(head_with(1, 2)), name, 1)
    with pytest.raises(InvalidArgument):
        delete_ref(head_with(1, 2), name)


def test_a_late_publication_does_not_pull_latest_back() -> None:
    assert head_with(3, 2).latest == 3
    assert set(history(head_with(3, 2)).versions()) == {2, 3}


def test_numbers_run_out_with_an_error() -> None:
    head, number = allocate(Head(next_version=MAX_VERSION))
    assert number == MAX_VERSION
    with pytest.raises(ResourceExhausted):
        allocate(head)


# --- a broken head --------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    nodes = Nodes()
    head = nodes.settle(head_with(1, 2, 3), 2)
    head = mark_history(set_ref(nodes.history(head), "prod", 2), 8)
    head = delete_versions(nodes.history(head), [1], 99)
    head = opened(opened(head)[0])[0]
    head = give_up_version(claim_version(head, 4, "c"), 5, "no more", 7)
    head = set_retention(head, Retention(keep_last=3))
    document: dict[str, Any] = json.loads(stamp(head, head, "w1").to_json())
    del document["digest"]
    return document


BREAKS: list[Any] = [
    lambda d: d.update(format=0),
    lambda d: d.update(format="1"),
    lambda d: d.update(format=True),
    lambda d: d.update(generation=0),
    lambda d: d.update(generation=1.0),
    lambda d: d.update(generation=2**63),
    lambda d: d.update(next_version=3),
    lambda d: d.update(next_version=-1),
    lambda d: d.update(registration=[]),
    lambda d: d.update(files_id=None),
    lambda d: d.update(files_id="x" * 129),
    lambda d: d.update(files_id="../../other"),
    lambda d: d.update(requires="deltas"),
    lambda d: d.update(recent={}),
    lambda d: d["recent"].append(d["recent"][0]),
    lambda d: d["recent"].append(7),
    lambda d: d["recent"][0].update(number=3),
    lambda d: d["recent"][0].update(number=0),
    lambda d: d["recent"][0].update(number=4),
    lambda d: d["recent"][0].update(number=9),
    lambda d: d["recent"][0].update(step=-1),
    lambda d: d["recent"][0].update(step=None),
    lambda d: d["recent"][0].update(run="a\nb"),
    lambda d: d["recent"][0].update(write_id=""),
    lambda d: d["recent"][0].update(retired_ms=-1),
    lambda d: d["recent"][0].update(retired_ms=None),
    lambda d: d["recent"][0].pop("nbytes"),
    lambda d: d["recent"][0].update(verified_ms=-1),
    lambda d: d["recent"][0].update(nonfinite_elements="1"),
    lambda d: d["recent"][0].update(ranks=2**63),
    lambda d: d["recent"][1].update(retired_ms=5),
    lambda d: d.update(removed=[0]),
    lambda d: d.update(removed=["1"]),
    lambda d: d.update(removed=[3]),
    lambda d: d.update(removed=[4]),
    lambda d: d.update(removed=[9]),
    lambda d: d.update(removed=[2]),
    lambda d: d.update(root=7),
    lambda d: d.update(root=None),
    lambda d: d["root"].update(name="../../head"),
    lambda d: d["root"].update(last=9),
    lambda d: d["root"].update(level=7),
    lambda d: d["root"].pop("durable"),
    lambda d: d.update(mark={}),
    lambda d: d["mark"].update(generation=-1),
    lambda d: d["mark"].update(marked_ms="8"),
    lambda d: d["mark"].pop("root"),
    lambda d: d["mark"].update(root={}),
    lambda d: d["refs"].update(latest={"version": 1}),
    lambda d: d["refs"].pop("latest"),
    lambda d: d["refs"].update(prod={"version": 1}),
    lambda d: d["refs"].update(prod={"version": 4}),
    lambda d: d["refs"].update(prod={"version": 64}),
    lambda d: d["refs"].update({"../x": {"version": 2}}),
    lambda d: d["refs"].update(live={"version": 2}),
    lambda d: d["refs"].update(prod={"version": "2"}),
    lambda d: d["refs"].update(prod=2),
    lambda d: d["refs"].update(prod={}),
    lambda d: d["open"].append(d["open"][0]),
    lambda d: d["open"][0].update(number=3),
    lambda d: d["open"][0].update(number=6),
    lambda d: d["open"][0].update(ranks=0),
    lambda d: d["open"][0].update(until_ms="1"),
    lambda d: d["open"][0].update(claim=7),
    lambda d: d["open"][0].pop("parent"),
    lambda d: d["failed"][0].update(number=4),
    lambda d: d["failed"][0].update(reason="a\nb"),
    lambda d: d["failed"][0].update(failed_ms=-1),
    lambda d: d["failed"][0].update(state=1),
    lambda d: d["failed"][0].update(step=-1),
    lambda d: d["failed"][0].update(run=None),
    lambda d: d["retention"].update(keep_last=-1),
    lambda d: d["retention"].update(keep_last=2**60),
    lambda d: d["retention"].pop("keep_every"),
    lambda d: d.update(writes=[7]),
    lambda d: d.update(writes=[["x"]]),
    lambda d: d.update(writes=["x"] * (REMEMBERED_WRITES + 1)),
    *[lambda d, name=name: d.pop(name) for name in good()],
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_a_head_that_contradicts_itself_is_data_loss(store: ObjectStore, number: int) -> None:
    document = good()
    BREAKS[number](document)
    store.put(SMOL.head_key, text_of(document), mode="create")
    with pytest.raises(DataLoss) as caught:
        HeadStore(store).read(SMOL)
    assert SMOL.head_key in caught.value.message
    assert "weighbridge fsck STORE --repair" in caught.value.fix
    assert len(str(caught.value)) < 600
    with pytest.raises(DataLoss):
        HeadStore(store).update(SMOL, allocate)
    left = store.get(SMOL.head_key)[0]
    assert left == text_of(document), "a head that cannot be read is left as it is"


def test_a_head_of_the_format_before_is_left_as_it_is_and_says_how_to_migrate_it(store: ObjectStore) -> None:
    for older in (1, 2):
        text = json.dumps({"format": older, "versions": []}).encode()
        store.put(SMOL.head_key, text, mode="overwrite")
        for use in (HeadStore(store).read, lambda model: HeadStore(store).update(model, allocate)):
            with pytest.raises(FailedPrecondition, match=f"{SMOL.head_key} has format {older}") as caught:
                use(SMOL)
            assert caught.value.fix == "run `weighbridge migrate STORE`"
        assert store.get(SMOL.head_key)[0] == text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"\x00",
        b"[" * 100_000,
        b'{"format": 1',
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b'{"format": 1e400}',
        b'{"format": ' + b"1" * 10_000 + b"}",
    ],
)
def test_text_that_is_no_head_is_data_loss(text: bytes) -> None:
    with pytest.raises(DataLoss):
        Head.from_json(text)


def test_a_head_is_refused_whichever_bit_of_it_is_flipped_and_wherever_it_is_cut() -> None:
    head = Head.from_json(text_of(good()))
    text = head.to_json()
    assert Head.from_json(text) == head
    for place, bit in itertools.product(range(len(text)), range(8)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << bit
        with pytest.raises(DataLoss, match=r"^head\.json "):
            Head.from_json(bytes(damaged))
    for cut in range(len(text)):
        with pytest.raises(DataLoss):
            Head.from_json(text[:cut])


def test_a_head_ends_with_the_digest_of_what_comes_before_it() -> None:
    text = Head.from_json(text_of(good())).to_json()
    start, end = text[:-77], text[-77:]
    assert end == b',"digest":"' + blake3(start).hexdigest().encode() + b'"}'
    for other in (start + b"}", start + b',"digest":"' + b"0" * 64 + b'"}', text + b"\n", b" " + text):
        with pytest.raises(DataLoss, match="digest"):
            Head.from_json(other)


@given(st.data())
def test_any_value_in_a_head_is_refused_or_kept(data: st.DataObject) -> None:
    """Whoever writes a head with a right digest may write it otherwise than this release does, or be wrong."""
    text = bytearray(text_of(good())[:-77])
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        head = Head.from_json(with_digest(bytes(text) + b"}"))
    except (DataLoss, FailedPrecondition):  # it may have become another format
        return
    assert Head.from_json(head.to_json()) == head


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": b"1"}, {"x": {1, 2}}])
def test_what_json_does_not_have_cannot_be_registered(store: ObjectStore, value: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        HeadStore(store).update(SMOL, lambda head: (register(head, "f", value), None), create=True)
    assert HeadStore(store).read(SMOL) is None


# --- taking turns ---------------------------------------------------------------------------------------------------


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
        ("earlier", b'{"format":2}'),
        ("later", text_of({"format": 4})),
    ):
        store.put(ModelName("acme", name).head_key, text, mode="create")
    found = {model.name: error.fix for model, error in heads.examined() if error}
    assert found == {
        "damaged": document_digests.REPAIR,
        "earlier": "run `weighbridge migrate STORE`",
        "later": "use a newer Weighbridge",
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
from tests.storage.head.test_head import allocate
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
        writers = [
            stack.enter_context(forked_python("-c", UPDATE, location, str(each))) for _ in range(processes)
        ]
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
    and it is written before the next put); ``late-read`` (likewise, after the next read).
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

    def map(self, key: str) -> Any:
        return self.inner.map(key)

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

    def discard_unfinished(
        self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None
    ) -> int:
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
    with pytest.raises(DeadlineExceeded, match="could not be found out"):
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
        (DeadlineExceeded, "could not be found out"),
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


def test_an_entry_holds_only_what_can_be_read_back() -> None:
    bad: list[dict[str, Any]] = [
        {"number": 0},
        {"step": -1},
        {"nbytes": 2**63},
        {"run": "\x00"},
        {"write_id": ""},
    ]
    for fields in bad:
        with pytest.raises(InvalidArgument):
            dataclasses.replace(entry(1), **fields)


def test_refs_have_a_limit() -> None:
    head = head_with(1)
    for i in range(MAX_REFS - 1):
        head = set_ref(history(head), f"tag{i}", 1)
    with pytest.raises(ResourceExhausted, match="refs"):
        set_ref(history(head), "more", 1)
    assert set_ref(history(head), "tag0", 1) == head, "moving one takes no room"
