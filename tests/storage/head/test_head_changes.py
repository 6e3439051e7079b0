"""Does a model's head change only forward, and only as it may?"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.heads import (
    Nodes,
    allocate,
    entry,
    head_with,
    history,
    open_version,
    opened,
)
from weighbridge._core.resources import Retention
from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    VersionFailed,
)
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import MAX_VERSION
from weighbridge_storage.head.head import REMEMBERED_FAILURES, REMEMBERED_WRITES, Head
from weighbridge_storage.head.head_changes import (
    MAX_REFS,
    delete_ref,
    delete_versions,
    forget_versions,
    keep,
    publish,
    register,
    set_ref,
    stamp,
)
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import (
    claim_version,
    give_up_abandoned,
    give_up_version,
    renew_version,
    still_open,
)


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
        self.head = keep(self.head, Retention(last, every, younger))
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


def test_refs_have_a_limit() -> None:
    head = head_with(1)
    for i in range(MAX_REFS - 1):
        head = set_ref(history(head), f"tag{i}", 1)
    with pytest.raises(ResourceExhausted, match="refs"):
        set_ref(history(head), "more", 1)
    assert set_ref(history(head), "tag0", 1) == head, "moving one takes no room"
