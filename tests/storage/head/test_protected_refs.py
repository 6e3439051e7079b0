"""Is a protected ref changed by what was asked for and approved by another, and by nothing else, whatever comes in
which order?
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.heads import in_memory, text_of
from weighbridge._core.resources import Retention
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from weighbridge_storage.documents.entries import Ref, RequestEntry, VersionEntry
from weighbridge_storage.head import head as head_module
from weighbridge_storage.head.head import PROTECTED_REFS, REMEMBERED_REQUESTS, Head
from weighbridge_storage.head.head_changes import delete_model, delete_versions
from weighbridge_storage.head.history import History
from weighbridge_storage.head.requests import (
    LIFETIME_MS,
    MAX_PROTECTED,
    Asker,
    Standing,
    approve_request,
    ask,
    expire,
    missing,
    protect,
    withdraw_request,
)
from weighbridge_storage.head.retention import decide, retire

VERSIONS = {number: VersionEntry(number, number, "r", 5, 10, 1, "", "claim") for number in range(1, 6)}
SCOPE = "tag:acme/smol@prod"
PEOPLE = ("ann", "bob", "cid")


def who(name: str, *, names_ref: bool = True, proven: bool = True) -> Asker:
    return Asker(name, proven, names_ref, SCOPE)


def standing(
    asks: Collection[str] = (*PEOPLE, "dan", "root"), approves: Collection[str] = (*PEOPLE, "dan", "root")
) -> Standing:
    return Standing(asks.__contains__, approves.__contains__)


def of(head: Head) -> History:
    return in_memory(head, *VERSIONS.values())


def wanted(
    request_id: str, by: str, version: int = 0, *, action: str = "", at: int = 10, ref: str = "prod"
) -> RequestEntry:
    """A request that a ref names a version, or goes."""
    action = action or ("move" if version else "delete")
    return RequestEntry(request_id, ref, action, by, at, at + LIFETIME_MS, version=version)


def protected(approvals: int, *, prod: int = 1) -> Head:
    head = Head(generation=1, next_version=9, recent=VERSIONS, refs={"latest": Ref(5), "prod": Ref(prod)})
    return protect(head, wanted("protect", "root", action="protect"), approvals, who("root"))


def asked(head: Head, request_id: str, by: str, version: int = 0, **said: Any) -> Head:
    return ask(of(head), wanted(request_id, by, version, **said), who(by))[0]


def approved(head: Head, request_id: str, by: str, *, at: int = 20) -> Head:
    return approve_request(of(head), "prod", request_id, who(by), standing(), now_ms=at)[0]


def state_of(head: Head, request_id: str) -> str:
    return next(each.state for each in head.requests if each.request_id == request_id)


def written(head: Head) -> Head:
    """The head as another process reads it."""
    return Head.from_json(head.to_json())


class Requests(RuleBasedStateMachine):
    """Random orders of requests, approvals, withdrawals and time, against a book of one line."""

    def __init__(self) -> None:
        super().__init__()
        self.approvals = 1
        self.head = protected(self.approvals)
        self.now = 10
        self.asked: dict[str, tuple[str, int]] = {}
        self.named = 1
        self.pending: tuple[str, int] | None = None
        self.yes: set[str] = set()
        self.asks, self.approves = set(PEOPLE), set(PEOPLE)

    def _over(self) -> None:
        self.pending, self.yes = None, set()

    @rule(by=st.sampled_from(PEOPLE), version=st.integers(0, 5))
    def ask_for(self, by: str, version: int) -> None:
        request_id = f"q{len(self.asked)}"
        if not version and not self.named:
            with pytest.raises(NotFound):
                ask(of(self.head), wanted(request_id, by, at=self.now), who(by))
            return
        self.head, found = ask(of(self.head), wanted(request_id, by, version, at=self.now), who(by))
        assert found.pending
        same = self.pending is not None and self.asked[self.pending[0]] == (by, version)
        assert (found.request_id == request_id) is not same, "asking twice is asking once"
        if not same:
            self.asked[request_id] = (by, version)
            self.pending, self.yes = (request_id, self.now + LIFETIME_MS), set()

    @rule(by=st.sampled_from(PEOPLE), nth=st.integers(0, 4))
    def approve(self, by: str, nth: int) -> None:
        if nth >= len(self.asked):
            return
        request_id = list(self.asked)[-1 - nth]
        asked_by, version = self.asked[request_id]
        live = self.pending is not None and self.pending[0] == request_id
        try:
            self.head, found = approve_request(
                of(self.head),
                "prod",
                request_id,
                who(by, names_ref=by in self.approves),
                standing(self.asks, self.approves),
                now_ms=self.now,
            )
        except PermissionDenied:
            assert by == asked_by or by not in self.approves
            return
        except FailedPrecondition:
            assert not live or asked_by not in self.asks
            return
        assert by != asked_by
        if live:
            self.yes.add(by)
            enough = len(self.yes & self.approves) >= self.approvals
            assert found.state == ("done" if enough else "pending")
            if enough:
                self.named = version
                self._over()
        else:
            assert found.state == "done", "of what is done already, another approval changes nothing"

    @rule(by=st.sampled_from(PEOPLE))
    def withdraw(self, by: str) -> None:
        if self.pending is not None:
            self.head, _ = withdraw_request(self.head, "prod", self.pending[0], who(by), now_ms=self.now)
            self._over()

    @rule(scopes=st.sampled_from(["asks", "approves"]), by=st.sampled_from(PEOPLE))
    def take_a_scope_away_or_give_it_back(self, scopes: str, by: str) -> None:
        getattr(self, scopes).symmetric_difference_update({by})

    @rule(days=st.integers(0, 5))
    def wait(self, days: int) -> None:
        self.now += days * 86_400_000
        if self.pending is not None and self.pending[1] < self.now:
            self._over()

    @rule()
    def raise_the_bar(self) -> None:
        if self.approvals == 1:
            self.approvals = 2
            self.head = protect(self.head, wanted("raise", "root", action="protect", at=self.now), 2, who("root"))

    @invariant()
    def the_ref_names_what_was_approved_and_the_head_is_stored_as_it_is(self) -> None:
        assert self.head.ref_numbers.get("prod", 0) == self.named
        pending = [each.request_id for each in expire(self.head, self.now).requests if each.pending]
        assert pending == ([self.pending[0]] if self.pending else [])
        assert written(self.head) == self.head
        assert len([each for each in self.head.requests if not each.pending]) <= REMEMBERED_REQUESTS


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase


def test_who_asks_cannot_approve_and_two_approvals_are_those_of_two() -> None:
    head = asked(protected(2), "q", "ann", 3)
    with pytest.raises(PermissionDenied, match="ann made this request"):
        approved(head, "q", "ann")
    head = approved(approved(head, "q", "bob"), "q", "bob")
    assert (state_of(head, "q"), head.ref_numbers["prod"]) == ("pending", 1)
    [pending] = [each for each in head.requests if each.pending]
    assert missing(head, pending, standing()) == 1
    head = approved(head, "q", "cid", at=30)
    assert head.ref_numbers["prod"] == 3
    done = head.requests[-1]
    assert (done.by, done.previous, done.closed_by, done.closed_ms) == ("ann", 1, "cid", 30)
    assert [(each.by, each.approved_ms) for each in done.approvals] == [("bob", 20), ("cid", 30)]


def test_what_counts_is_who_may_approve_and_ask_when_the_ref_moves() -> None:
    head = approved(asked(protected(2), "q", "ann", 3), "q", "bob")
    without_bob = standing(approves=("cid", "root"))
    head, found = approve_request(of(head), "prod", "q", who("cid"), without_bob, now_ms=30)
    assert (found.state, missing(head, found, without_bob), head.ref_numbers["prod"]) == ("pending", 1, 1)
    with pytest.raises(FailedPrecondition, match="ann made this request, and no longer has a scope"):
        approve_request(of(head), "prod", "q", who("root"), standing(asks=("root",)), now_ms=30)
    after, found = approve_request(of(head), "prod", "q", who("root"), without_bob, now_ms=30)
    assert (found.state, after.ref_numbers["prod"]) == ("done", 3)
    # of who may again, the approval counts again, and is not given twice
    after, found = approve_request(of(head), "prod", "q", who("cid"), standing(), now_ms=30)
    assert (found.state, len(found.approvals), after.ref_numbers["prod"]) == ("done", 2, 3)


def test_an_approval_of_what_was_superseded_approves_nothing_and_says_what_is_asked_now() -> None:
    head = asked(asked(protected(1), "first", "ann", 2), "second", "dan", 3)
    with pytest.raises(FailedPrecondition, match="first for prod was superseded by dan; second of dan"):
        approved(head, "first", "bob")
    assert approved(head, "second", "bob").ref_numbers["prod"] == 3


def test_an_approval_that_is_repeated_after_the_request_has_ended_hears_so() -> None:
    head = approved(asked(protected(2), "q", "ann", 2), "q", "bob")
    withdrawn = withdraw_request(head, "prod", "q", who("ann"), now_ms=20)[0]
    with pytest.raises(FailedPrecondition, match="was withdrawn by ann"):
        approved(withdrawn, "q", "bob", at=30)
    with pytest.raises(FailedPrecondition, match="has expired"):
        approved(head, "q", "bob", at=11 + LIFETIME_MS)


def test_what_is_repeated_after_its_answer_was_lost_finds_what_it_has_done() -> None:
    head = asked(protected(1), "q", "ann", 2)
    assert asked(head, "q", "ann", 2) == head
    done = approved(head, "q", "bob")
    assert approved(done, "q", "bob", at=50) == done
    assert ask(of(done), wanted("q", "ann", 2, at=60), who("ann")) == (done, done.requests[-1])
    gone = withdraw_request(head, "prod", "q", who("ann"), now_ms=20)[0]
    assert withdraw_request(gone, "prod", "q", who("ann"), now_ms=30)[0] == gone
    with pytest.raises(FailedPrecondition, match="was withdrawn by ann"):
        asked(gone, "q", "ann", 2)


def test_a_name_stands_for_one_request() -> None:
    head = asked(protected(1), "q", "ann", 2)
    for other in (wanted("q", "ann", 3), wanted("q", "bob", 2), wanted("q", "ann")):
        with pytest.raises(AlreadyExists):
            ask(of(head), other, who(other.by))
    with pytest.raises(NotFound):
        approve_request(of(head), "other", "q", who("bob"), standing(), now_ms=20)


def test_a_request_expires_and_cannot_be_approved_from_then_on() -> None:
    head = asked(protected(1), "q", "ann", 2)
    assert approved(head, "q", "bob", at=10 + LIFETIME_MS).ref_numbers["prod"] == 2
    with pytest.raises(FailedPrecondition, match="has expired"):
        approved(head, "q", "bob", at=11 + LIFETIME_MS)
    late = expire(head, 11 + LIFETIME_MS)
    assert (state_of(late, "q"), expire(late, 12 + LIFETIME_MS)) == ("expired", late)


ACTS: list[Callable[[Head, Asker], object]] = [
    lambda head, asker: ask(of(head), wanted("n", asker.name, 2), asker),
    lambda head, asker: ask(of(head), wanted("n", asker.name), asker),
    lambda head, asker: ask(of(head), wanted("n", asker.name, action="unprotect"), asker),
    lambda head, asker: approve_request(of(head), "prod", "q", asker, standing(), now_ms=20),
    lambda head, asker: withdraw_request(head, "prod", "q", asker, now_ms=20),
]


@pytest.mark.parametrize("act", ACTS)
def test_a_scope_has_to_name_the_ref(act: Callable[[Head, Asker], object]) -> None:
    head = asked(protected(1), "q", "ann", 3)
    with pytest.raises(PermissionDenied, match="no scope of eve names it") as refused:
        act(head, who("eve", names_ref=False))
    assert SCOPE in refused.value.fix


@pytest.mark.parametrize("act", ACTS[:4])
def test_whoever_is_not_known_is_nobodys_second_identity(act: Callable[[Head, Asker], object]) -> None:
    with pytest.raises(FailedPrecondition, match="the caller is not identified") as refused:
        act(asked(protected(1), "q", "ann", 3), who("anonymous", proven=False))
    assert "--policy" in refused.value.fix
    with pytest.raises(FailedPrecondition, match="the caller is not identified"):
        protect(Head(generation=1), wanted("p", "x", action="protect"), 0, who("x", proven=False))


def test_without_approvals_whoever_has_the_scope_changes_it_at_once_and_it_is_remembered() -> None:
    head, done = ask(of(protected(0)), wanted("q", "ann", 2), who("ann"), may_wait=False)
    assert (head.ref_numbers["prod"], done.state, head.requests[-1]) == (2, "done", done)
    head, _ = ask(of(head), wanted("r", "ann"), who("ann"))
    assert "prod" not in head.refs


def test_a_ref_that_is_not_protected_is_changed_as_ever_and_nothing_is_remembered_of_it() -> None:
    head, done = ask(of(protected(1)), wanted("q", "eve", 2, ref="dev"), who("eve", names_ref=False))
    assert (head.ref_numbers["dev"], done.state) == (2, "done")
    assert [each.ref for each in head.requests] == ["prod"]


def test_what_may_not_wait_is_refused_and_asks_for_nothing() -> None:
    head = protected(1)
    with pytest.raises(FailedPrecondition, match="needs the approval of another identity"):
        ask(of(head), wanted("q", "ann", 2), who("ann"), may_wait=False)


@pytest.mark.parametrize("version", [2, 0], ids=["move", "delete"])
def test_what_may_not_wait_is_refused_also_while_the_same_is_asked_for(version: int) -> None:
    head = asked(protected(1), "q", "ann", version)
    with pytest.raises(FailedPrecondition, match="needs the approval of another identity"):
        ask(of(head), wanted("r", "ann", version), who("ann"), may_wait=False)


def test_a_ref_can_be_protected_before_there_is_one() -> None:
    head = protect(Head(generation=1), wanted("p", "root", ref="main", action="protect"), 1, who("root"))
    head = replace(head, next_version=9, recent=VERSIONS, refs={"latest": Ref(5)})
    head = asked(head, "q", "ann", 2, ref="main")
    assert "main" not in head.refs
    head, _ = approve_request(of(head), "main", "q", who("bob"), standing(), now_ms=20)
    assert (head.ref_numbers["main"], head.requests[-1].previous) == (2, 0)


def test_protection_is_raised_by_whoever_manages_and_lowered_only_by_approval() -> None:
    head = asked(protected(1), "move", "ann", 2)
    with pytest.raises(FailedPrecondition, match="cannot be lowered to 0"):
        protect(head, wanted("p", "root", action="protect"), 0, who("root"))
    head = asked(head, "free", "ann", action="unprotect")
    assert (state_of(head, "move"), head.protected["prod"].approvals) == ("superseded", 1)
    head = approved(head, "free", "bob")
    assert (head.protected, head.requires) == ({}, ())
    head, _ = ask(of(head), wanted("q", "eve", 4), who("eve", names_ref=False))
    assert head.ref_numbers["prod"] == 4
    with pytest.raises(NotFound, match="is not protected"):
        asked(head, "again", "ann", action="unprotect")


@pytest.mark.parametrize("ref", ["latest", "live", "17", "a/b", ""])
def test_what_moves_by_itself_or_is_no_name_is_not_protected(ref: str) -> None:
    with pytest.raises(InvalidArgument):
        protect(Head(generation=1), wanted("p", "root", action="protect", ref=ref), 0, who("root"))


def test_there_are_bounds() -> None:
    head = Head(generation=1)
    for approvals in (-1, 17):
        with pytest.raises(InvalidArgument):
            protect(head, wanted("p", "root", action="protect"), approvals, who("root"))
    for i in range(MAX_PROTECTED):
        head = protect(head, wanted(f"p{i}", "root", action="protect", ref=f"r{i}"), 1, who("root"))
    with pytest.raises(ResourceExhausted):
        protect(head, wanted("p", "root", action="protect"), 1, who("root"))
    for request_id in ("", "a b", "x" * 65):
        with pytest.raises(InvalidArgument):
            wanted(request_id, "ann", 2)


def test_a_model_with_protected_refs_is_not_deleted_and_what_is_asked_for_is_kept() -> None:
    head = asked(replace(protected(1), retention=Retention(keep_last=1)), "q", "ann", 2)
    with pytest.raises(FailedPrecondition, match="refs of the model are protected: prod"):
        delete_model(head, 20)
    with pytest.raises(FailedPrecondition, match="a pending request asks to move prod to version 2"):
        delete_versions(of(head), [2], 20)
    assert decide(head, VERSIONS, 20).retired == (3, 4)
    after, _ = retire(of(head), 20)
    assert approved(after, "q", "bob").ref_numbers["prod"] == 2
    assert decide(head, VERSIONS, 11 + LIFETIME_MS).retired == (2, 3, 4)
    assert delete_versions(of(head), [2], 11 + LIFETIME_MS).recent[2].retired


def test_a_service_that_knows_no_protected_refs_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = protected(0).to_json()
    assert json.loads(text)["requires"] == [PROTECTED_REFS]
    monkeypatch.setattr(head_module, "FEATURES", head_module.FEATURES - {PROTECTED_REFS})
    with pytest.raises(FailedPrecondition, match="requires 'protected-refs'"):
        Head.from_json(text)


def test_fields_of_later_releases_stay() -> None:
    document = json.loads(asked(protected(2), "q", "ann", 2).to_json())
    document["gate"]["protected"]["prod"]["window"] = "night"
    document["requests"][-1] |= {"stage": 3, "approvals": [{"by": "dan", "approved_ms": 7, "how": "card"}]}
    head = approved(Head.from_json(text_of(document)), "q", "bob")
    again = json.loads(head.to_json())
    assert again["gate"]["protected"]["prod"] == {"approvals": 2, "window": "night"}
    assert (again["requests"][-1]["stage"], again["requests"][-1]["approvals"][0]["how"]) == (3, "card")
    assert head.ref_numbers["prod"] == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document["requests"].append({**document["requests"][-1], "request_id": "r"}),
        lambda document: document["requests"].append(document["requests"][-1]),
        lambda document: document.pop("gate"),
        lambda document: document["gate"].update(protected={"prod": {"approvals": 99}}),
        lambda document: document["gate"].update(protected={"latest": {"approvals": 1}}),
        lambda document: document["requests"][-1].update(approvals=[7]),
        lambda document: document["requests"][-1].pop("by"),
    ],
)
def test_a_head_whose_requests_contradict_each_other_is_damaged(damage: Callable[[Any], object]) -> None:
    document = json.loads(asked(protected(1), "q", "ann", 2).to_json())
    damage(document)
    with pytest.raises(DataLoss):
        Head.from_json(text_of(document))
