"""Does `latest` never name a version that is held, whatever is published, approved and retired in which order, and is
that stored safely?
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.heads import Nodes, open_version, text_of
from weighbridge._core.resources import Gate, Retention
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from weighbridge_storage.documents.entries import Approval, VersionEntry
from weighbridge_storage.head import head as head_module
from weighbridge_storage.head.head import HELD_VERSIONS, Head
from weighbridge_storage.head.head_changes import delete_versions, keep, publish, set_ref, stamp
from weighbridge_storage.head.open_versions import Said, claim_version
from weighbridge_storage.head.requests import approve_version
from weighbridge_storage.head.retention import decide, retire

CLAIM = "claim"


def opened(head: Head, said: Said | None = None, request_id: str = "") -> tuple[Head, int]:
    """The head with a further version that is claimed; its number."""
    head, entry = open_version(
        head, request_id=request_id or f"q{head.next_version}", step=1, run="r", ranks=2, now_ms=5, lease_ms=9,
        said=said or Said(),
    )  # fmt: skip
    return claim_version(head, entry.number, CLAIM), entry.number


def entry_of(number: int, *held: str) -> VersionEntry:
    """Entry of a published version that is held for these reasons."""
    return VersionEntry(number, 1, "r", 5, 10, 1, "", CLAIM, held=held)


def published(nodes: Nodes, head: Head, *held: str, said: Said | None = None) -> Head:
    """The head with a further version in its history."""
    head, number = opened(head, said)
    return publish(nodes.history(head), entry_of(number, *held))


def approval(*reasons: str, at: int = 7) -> Approval:
    return Approval("ann", at, "looked at it", reasons)


def written(head: Head) -> Head:
    """The head as another process reads it."""
    return Head.from_json(replace(head, generation=max(head.generation, 1)).to_json())


@pytest.mark.parametrize("seed", range(40))
def test_latest_names_the_highest_version_that_is_not_held_in_every_order_of_changes(seed: int) -> None:
    dice, nodes, head = random.Random(seed), Nodes(), Head(generation=1)
    receiving: list[int] = []
    before = 0
    for turn in range(60):
        versions = nodes.history(head).versions()
        match dice.choice(("open", "publish", "publish", "approve", "approve", "retire", "settle")):
            case "open":
                head, number = opened(head, Said(candidate=dice.random() < 0.5))
                receiving.append(number)
            case "publish" if receiving:
                number = receiving.pop(dice.randrange(len(receiving)))
                held = ("nonfinite",) if dice.random() < 0.4 else ()
                head = publish(nodes.history(head), entry_of(number, *held))
                assert publish(nodes.history(head), entry_of(number, *held)) == head
            case "approve" if versions or receiving:
                number = dice.choice([*versions, *receiving])
                said = approval(*dice.choice((("candidate",), ("nonfinite",), ("candidate", "nonfinite"))))
                head = approve_version(nodes.history(head), number, said)
                assert approve_version(nodes.history(head), number, said) == head, "approved again"
            case "retire":
                head = replace(head, retention=Retention(keep_last=dice.choice((1, 3))))
                good = [n for n, entry in versions.items() if not entry.held]
                head, decision = retire(nodes.history(head), 10)
                assert set(good[-head.retention.keep_last :]).isdisjoint(decision.retired)
            case "settle":
                head = nodes.settle(replace(head, generation=turn + 2), 2)
        versions = nodes.history(head).versions()
        released = [number for number, entry in versions.items() if not entry.held]
        assert head.latest == max(released, default=0)
        assert head.latest >= before
        before = head.latest
        held_anywhere = any(entry.held for entry in (*versions.values(), *head.open.values()))
        assert not held_anywhere or head.requires == (HELD_VERSIONS,)
        assert written(head) == replace(head, generation=max(head.generation, 1))


def test_publishing_and_approving_lead_to_the_same_head_in_either_order() -> None:
    nodes = Nodes()
    head, number = opened(published(nodes, Head()), Said(candidate=True))
    both, entry = approval("candidate", "nonfinite"), entry_of(number, "nonfinite")
    first = publish(nodes.history(approve_version(nodes.history(head), number, both)), entry)
    last = approve_version(nodes.history(publish(nodes.history(head), entry)), number, both)
    assert first == last
    assert first.latest == number
    assert first.recent[number].approval == both


def test_what_is_found_after_the_approval_of_a_candidate_holds_it_again() -> None:
    nodes = Nodes()
    head, number = opened(Head(), Said(candidate=True))
    head = approve_version(nodes.history(head), number, approval("candidate"))
    head = publish(nodes.history(head), entry_of(number, "nonfinite"))
    assert (head.recent[number].held, head.latest) == (("nonfinite",), 0)
    head = approve_version(nodes.history(head), number, approval("nonfinite", at=9))
    assert head.latest == number
    assert head.recent[number].approval == Approval("ann", 9, "looked at it", ("candidate", "nonfinite"))


def test_nothing_is_approved_that_is_not_there() -> None:
    nodes = Nodes()
    head = published(nodes, published(nodes, Head()), "nonfinite")
    with pytest.raises(NotFound):
        approve_version(nodes.history(head), 3, approval("nonfinite"))
    gone = delete_versions(nodes.history(head), [2], 10)
    with pytest.raises(NotFound):
        approve_version(nodes.history(gone), 2, approval("nonfinite"))


def test_a_model_whose_gate_requires_approval_holds_what_is_opened_from_then_on() -> None:
    head, before = opened(Head())
    head, after = opened(keep(head, Gate(approval_required=True, allow_nonfinite=True)))
    assert (head.open[before].held, head.open[before].allow_nonfinite) == ((), False)
    assert (head.open[after].held, head.open[after].allow_nonfinite) == (("candidate",), True)
    assert written(head).gate == head.gate


def test_further_ranks_add_to_what_is_said_of_a_version_and_do_not_contradict_it() -> None:
    head, number = opened(Head(), request_id="q")
    head, _ = opened(head, Said(metadata={"reward": 0.5}), "q")
    head, _ = opened(head, Said(candidate=True, allow_nonfinite=True), "q")
    same, again = opened(head, Said(metadata={"reward": 0.5}), "q")
    assert (same, again) == (head, number)
    entry = head.open[number]
    assert (entry.held, entry.allow_nonfinite, entry.metadata) == (("candidate",), True, {"reward": 0.5})
    with pytest.raises(InvalidArgument, match="different metadata") as told:
        opened(head, Said(metadata={"reward": 0.6, "lr": 1}), "q")
    assert told.value.details == ("lr: None and 1", "reward: 0.5 and 0.6")
    assert publish(Nodes().history(head), entry_of(number)).recent[number].metadata == {"reward": 0.5}


def test_a_tag_may_name_a_held_version_of_a_model_that_has_no_latest() -> None:
    nodes = Nodes()
    head = set_ref(nodes.history(published(nodes, Head(), "nonfinite")), "canary", 1)
    assert written(head).ref_numbers == {"canary": 1}


# --- as it is stored


def test_a_head_without_held_versions_says_nothing_of_them() -> None:
    nodes = Nodes()
    head = stamp(published(nodes, published(nodes, Head())), Head(), "w")
    text = json.loads(head.to_json())
    assert text["requires"] == []
    assert not text.keys() & {"gate", "held"}
    fields = {"number", "step", "run", "created_ms", "nbytes", "tensor_count", "files_id", "write_id"}
    assert all(entry.keys() == fields for entry in text["recent"])
    [ref] = [child["root"] for child in [json.loads(nodes.settle(head, 0).to_json())]]
    assert ref.keys() == {"name", "level", "last", "durable", "retired"}


@pytest.mark.parametrize("where", ["recent", "open", "tree", "gate"])
def test_a_release_that_knows_no_held_versions_refuses_a_head_that_has_some(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes()
    head = published(nodes, Head(generation=1))
    match where:
        case "recent":
            head = published(nodes, head, "nonfinite")
        case "open":
            head, _ = opened(head, Said(candidate=True))
        case "tree":
            head = nodes.settle(published(nodes, head, "nonfinite"), 0)
            head = replace(head, recent={})
            assert head.root is not None
            assert head.root.held == 1
        case "gate":
            head = keep(head, Gate(approval_required=True))
    assert written(head) == head
    monkeypatch.setattr(head_module, "FEATURES", frozenset())
    with pytest.raises(FailedPrecondition, match="requires 'held-versions'"):
        Head.from_json(head.to_json())


def test_a_head_requires_nothing_any_more_once_all_is_approved_and_published() -> None:
    nodes = Nodes()
    head = nodes.settle(published(nodes, Head(generation=1), "nonfinite"), 0)
    head = approve_version(nodes.history(head), 1, approval("nonfinite"))
    assert (head.requires, head.latest) == ((HELD_VERSIONS,), 1)  # the tree says so until it is written anew
    head = nodes.settle(replace(head, generation=2), 0)
    assert head.requires == ()


@pytest.mark.parametrize(
    "change",
    [
        {"held": "nonfinite"},
        {"held": ["b", "a"]},
        {"held": ["a", "a"]},
        {"held": [""]},
        {"held": [f"{i:02}" for i in range(17)]},
        {"approval": {"reasons": [], "by": "", "approved_ms": 1}},
        {"approval": {"reasons": ["a"], "by": "x" * 300, "approved_ms": 1}},
        {"approval": ["a"]},
        {"metadata": {"reward": [1]}},
        {"metadata": {"a b": 1}},
        {"metadata": {"a": "x" * 5000}},
    ],
)
def test_what_cannot_be_said_of_a_held_version_is_damage(change: dict[str, Any]) -> None:
    text = json.loads(published(Nodes(), Head(generation=1)).to_json())
    text["recent"][0] |= change
    with pytest.raises(DataLoss):
        Head.from_json(text_of(text))


# --- what is kept


@pytest.mark.parametrize(
    ("held", "keep", "kept"),
    [
        ((0, 0, 0, 1, 1, 1), Retention(keep_last=2), [2, 3, 5, 6]),  # two of either
        ((1, 0, 0, 0), Retention(keep_last=2), [3, 4]),  # older than all that are kept
        ((0, 1, 0, 1), Retention(keep_last=1), [3, 4]),
        ((1, 1, 1), Retention(keep_last=2), [2, 3]),
        ((1, 0, 0, 0), Retention(keep_every=10), [2, 4]),  # and what latest names
    ],
)
def test_a_held_version_never_takes_the_place_of_one_that_is_not(
    held: tuple[int, ...], keep: Retention, kept: list[int]
) -> None:
    nodes, head = Nodes(), Head(retention=keep)
    for each in held:
        head = published(nodes, head, *(("nonfinite",) if each else ()))
    decision = decide(head, nodes.history(head).versions(), now_ms=10)
    assert [each.number for each in decision.kept] == kept
