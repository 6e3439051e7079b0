"""Are the versions kept that rules and refs require, no more and no less, whatever happens later?"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.heads import Nodes, history, open_version
from weighbridge._core.resources import Retention
from weighbridge.errors import InvalidArgument
from weighbridge_storage.documents.entries import OpenEntry, Ref, VersionEntry
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import (
    delete_versions,
    forget_versions,
    keep,
    publish,
    set_ref,
)
from weighbridge_storage.head.open_versions import claim_version, give_up_version
from weighbridge_storage.head.retention import Decision, decide, retire

NOW = 1_000_000


def version(number: int, created_ms: int = 0) -> VersionEntry:
    return VersionEntry(number, number, "r", created_ms, 10, 1, "f", f"w{number}")


def head_of(created: Mapping[int, int], retention: Retention, tags: Mapping[str, int] | None = None) -> Head:
    """A head with these versions, by number and time."""
    return Head(
        next_version=max(created, default=0) + 1,
        recent={number: version(number, ms) for number, ms in created.items()},
        refs={
            name: Ref(number)
            for name, number in {**(tags or {}), **({"latest": max(created)} if created else {})}.items()
        },
        retention=retention,
    )


def decided_of(head: Head, now_ms: int = NOW) -> Decision:
    return decide(head, history(head).versions(), now_ms)


def kept(head: Head, now_ms: int = NOW) -> list[int]:
    return [version.number for version in decided_of(head, now_ms).kept]


heads = st.builds(
    lambda created, retention, tagged: head_of(
        created, retention, {f"tag{i}": sorted(created)[n % len(created)] for i, n in enumerate(tagged)} if created else {}
    ),
    st.dictionaries(st.integers(1, 60), st.integers(0, 2 * NOW), max_size=25),
    st.builds(Retention, st.integers(0, 8), st.integers(0, 20), st.integers(0, 2 * NOW // 1000)),
    st.lists(st.integers(0, 100), max_size=3),
)  # fmt: skip


@given(
    heads,
    st.integers(0, 2 * NOW),
    st.dictionaries(st.integers(1, 60), st.just(["vllm at node7"]), max_size=3),
)
def test_a_version_is_kept_if_and_only_if_something_speaks_for_it(
    head: Head, now_ms: int, served: Mapping[int, list[str]]
) -> None:
    rules = head.retention
    versions = history(head).versions()
    decided = decide(head, versions, now_ms, served)
    found = {version.number: version for version in decided.kept}
    for number, entry in versions.items():
        others = set(versions) - {number}
        speaking = set()
        if rules.keep_last and sum(other > number for other in others) < rules.keep_last:
            speaking.add("keep_last")
        if rules.keep_every:
            slot_begin = number - number % rules.keep_every
            if not any(other in others for other in range(slot_begin, number)):
                speaking.add("keep_every")
        if rules.keep_younger_s and now_ms - entry.created_ms < rules.keep_younger_s * 1000:
            speaking.add("keep_younger_s")
        if rules == Retention():
            speaking.add("keep_everything")
        refs = {name for name, named in head.ref_numbers.items() if named == number}
        if speaking or refs or number in served:
            assert (set(found[number].rules), set(found[number].refs)) == (speaking, refs)
            assert list(found[number].engines) == served.get(number, [])
        else:
            assert number in decided.retired
    assert sorted([*found, *decided.retired]) == sorted(versions)


@given(heads, st.integers(0, 2 * NOW), st.integers(0, 4))
def test_what_is_retired_stays_readable_and_leaves_nothing_more_to_decide(head: Head, now_ms: int, most: int) -> None:
    nodes = Nodes()
    head = nodes.settle(head, most)
    after, decided = retire(nodes.history(head), now_ms)
    there = nodes.history(after)
    assert {number: entry.retired_ms for number, entry in there.retired().items()} == dict.fromkeys(
        decided.retired, max(now_ms, 1)
    )
    assert set(there.versions()) == {version.number for version in decided.kept}
    assert after.refs == head.refs
    settled = nodes.settle(after, most)
    again, nothing = retire(nodes.history(settled), now_ms)
    assert again == settled
    assert (nothing.kept, nothing.retired) == (decided.kept, ())


def test_the_rules_keep_what_their_words_say() -> None:
    versions = dict.fromkeys(range(95, 106), 0) | {105: NOW - 999, 103: NOW - 1000}
    assert kept(head_of(versions, Retention(keep_last=3))) == [103, 104, 105]
    assert kept(head_of(versions, Retention(keep_every=100))) == [95, 100, 105]
    assert kept(head_of(versions, Retention(keep_every=5))) == [95, 100, 105]
    assert kept(head_of(versions, Retention(keep_younger_s=1))) == [105]
    assert kept(head_of(versions, Retention(keep_last=1), {"prod": 97})) == [97, 105]
    assert kept(head_of(versions, Retention())) == sorted(versions)
    assert kept(head_of(versions, Retention(keep_last=2**53, keep_every=2**53, keep_younger_s=2**53))) == sorted(
        versions
    )
    assert decided_of(Head(retention=Retention(keep_last=1))).kept == ()


def of_steps(*steps: tuple[str, int], held: Collection[int] = (), every: int = 0) -> Head:
    """A head whose versions, from 1 on, have these runs and steps."""
    recent = {
        number: replace(version(number), run=run, step=step, held=("candidate",) if number in held else ())
        for number, (run, step) in enumerate(steps, 1)
    }
    return Head(
        generation=1,
        next_version=len(steps) + 1,
        recent=recent,
        refs={"latest": Ref(max(recent.keys() - held))},
        retention=Retention(keep_every_steps=every),
    )


def test_one_version_of_every_so_many_steps_of_each_run_is_kept() -> None:
    """A trainer that pushes each tenth step has numbers that say nothing of its steps."""
    pushed = [("a", step) for step in range(10, 320, 10)]
    assert kept(of_steps(*pushed, every=100)) == [1, 10, 20, 30, 31]  # steps 10, 100, 200 and 300, and latest
    assert kept(of_steps(("a", 100), ("b", 100), ("a", 150), ("b", 299), every=100)) == [1, 2, 4]
    assert kept(of_steps(("a", 100), ("a", 100), ("a", 199), ("a", 200), held=[1], every=100)) == [2, 4]
    assert kept(of_steps(("import", 0), ("a", 0), ("a", 0), every=5)) == [1, 2, 3]
    rules = of_steps(("a", 7), every=5)
    assert decided_of(rules).kept[0].rules == ("keep_every_steps",)


def test_a_head_that_counts_steps_is_for_programs_that_know_it() -> None:
    plain, counting = of_steps(("a", 1)), of_steps(("a", 1), every=50)
    assert (plain.requires, counting.requires) == ((), ("kept-steps",))
    assert json.loads(counting.to_json())["retention"]["keep_every_steps"] == 50
    assert [Head.from_json(head.to_json()) for head in (plain, counting)] == [plain, counting]


def test_a_version_from_the_future_of_this_clock_is_young() -> None:
    assert kept(head_of({1: NOW + 5000, 2: 0, 3: 0}, Retention(keep_younger_s=1))) == [1, 3]


def opened(head: Head) -> tuple[Head, OpenEntry]:
    return open_version(head, request_id=f"q{head.next_version}", step=1, run="r", ranks=1, now_ms=0, lease_ms=10 * NOW)


@given(st.data(), st.integers(1, 5))
def test_the_one_of_every_k_stays_the_one_in_whatever_order_versions_come(data: st.DataObject, every: int) -> None:
    """Once no lower number of its slot is open, the first of a slot is kept for good; no slot that had one is ever
    empty.
    """
    head = keep(Head(), Retention(keep_every=every))
    final: set[int] = set()
    for _ in range(data.draw(st.integers(0, 25))):
        step = data.draw(st.sampled_from(["open", "publish", "give up", "retire", "forget"]))
        open_numbers = sorted(head.open)
        if step == "open" or not open_numbers:
            head, _ = opened(head)
        elif step == "publish":
            number = data.draw(st.sampled_from(open_numbers))
            head = publish(history(claim_version(head, number, f"w{number}")), version(number))
        elif step == "give up":
            head = give_up_version(head, data.draw(st.sampled_from(open_numbers)), "gone", NOW)
        elif step == "retire":
            head, _ = retire(history(head), NOW)
        else:
            head = forget_versions(history(head), list(history(head).retired()))
        there = history(head).versions()
        slots = {number // every for number in there}
        firsts = {min(n for n in there if n // every == slot) for slot in slots}
        final |= {n for n in firsts if not any(o // every == n // every and o < n for o in head.open)}
        assert final <= set(there)
        assert {n // every for n in history(head).retired()} <= slots
    assert final <= {kept.number for kept in decided_of(head).kept}


def test_a_slot_whose_first_version_is_deleted_by_hand_keeps_the_next_one() -> None:
    before = head_of(dict.fromkeys(range(1, 8), 0), Retention(keep_every=4))
    head = delete_versions(history(before), [4], NOW)
    assert kept(head) == [1, 5, 7]


def test_a_tag_keeps_a_version_that_the_rules_do_not() -> None:
    head = set_ref(history(head_of(dict.fromkeys(range(1, 5), 0), Retention(keep_last=1))), "prod", 2)
    (tagged, newest) = decided_of(head).kept
    assert (tagged.number, tagged.rules, tagged.refs) == (2, (), ("prod",))
    assert (newest.number, newest.rules, newest.refs) == (4, ("keep_last",), ("latest",))


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_younger_s", "keep_every_steps"])
@pytest.mark.parametrize("value", [-1, 2**53 + 1, 1.0, "3", None, True])
def test_rules_that_are_no_counts_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Retention(**{name: value})  # type: ignore[arg-type]
