"""Histories in a store: what pushes cost, and what holds with crashes, rivals, readers with old heads, and newer
releases.

``WEIGHBRIDGE_HISTORY_VERSIONS`` says how many versions a long history has.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.heads import open_version, stored, text_of
from tests.support.rounds import rounds
from weighbridge._core.resources import Retention
from weighbridge.errors import AlreadyExists, Conflict, DataLoss, FailedPrecondition, Unavailable
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import ModelName, node_key, node_of_key
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import (
    delete_versions,
    forget_versions,
    keep,
    mark_history,
    publish,
    register,
    set_ref,
)
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import MOST_RECENT, History
from weighbridge_storage.head.history_tree import names
from weighbridge_storage.head.leases import Grace
from weighbridge_storage.head.open_versions import claim_version, give_up_version
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import Buffer, IfMatch, ObjectStore, PutMode

VERSIONS = rounds("HISTORY_VERSIONS")
SMOL = ModelName("acme", "smol")
GRACE = Grace(1000)
PUSHES = 64
"""Pushes that are measured together: as many as change the tree a few times."""
BOUND = 1.3


class Watched(LocalStore):
    """A local store that counts what is asked of it, and lets a test come between."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.before: Callable[[str, str], None] = lambda _verb, _key: None

    def get(self, key: str) -> tuple[bytes, str]:
        self.before("get", key)
        data, etag = super().get(key)
        self.calls["get"] += 1
        self.nbytes["read"] += len(data)
        return data, etag

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        assert isinstance(data, bytes)
        self.before("put", key)
        self.calls["put"] += 1
        self.nbytes["written"] += len(data)
        return super().put(key, data, mode=mode)

    def size(self, key: str) -> int:
        self.calls["size"] += 1
        return super().size(key)

    def list(self, prefix: str) -> Iterator[str]:
        self.before("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self.before("delete", key)
        super().delete(key)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


def entry(number: int) -> VersionEntry:
    # as long as those of real pushes
    return VersionEntry(number, number * 10, "run-7", 1767225600000, 10**9, 300, "f" * 64, f"{number:064d}")


def opened(head: Head) -> tuple[Head, int]:
    request = f"{head.next_version:032d}"
    head, there = open_version(
        head, request_id=request, step=1, run="run-7", ranks=8, now_ms=1767225600000, lease_ms=10**6
    )
    return head, there.number


def push(heads: HeadStore) -> int:
    """The writes of one push: open, claim, publish, tag."""
    number = heads.update(SMOL, opened, create=True)
    heads.update(SMOL, lambda head: (claim_version(head, number, entry(number).write_id), None))
    heads.edit(SMOL, lambda history: (publish(history, entry(number)), None))
    heads.edit(SMOL, lambda history: (set_ref(history, "prod", number), None))
    return number


def push_many(heads: HeadStore, count: int) -> None:
    """Add versions, some hundreds with one write."""

    def change(most: int, history: History) -> tuple[Head, None]:
        for _ in range(most):
            head, number = opened(history.head)
            head = claim_version(head, number, entry(number).write_id)
            history = history.under(publish(history.under(head), entry(number)))
        return history.head, None

    for start in range(0, count, 500):
        heads.edit(SMOL, partial(change, min(500, count - start)), create=True)


def history_of(heads: HeadStore) -> History:
    found = heads.history(SMOL)
    assert found is not None
    return found


def nodes_in(store: ObjectStore) -> set[str]:
    return {node[0] for key in store.list(SMOL.prefix) if (node := node_of_key(SMOL, key)) is not None}


def tree_in(store: ObjectStore) -> set[str]:
    return names(stored(store, SMOL).head.root, partial(HeadStore(store).load_node, SMOL))


# --- what a push costs ----------------------------------------------------------------------------------------------


def cost_of_pushes(watched: Watched, heads: HeadStore) -> Counter[str]:
    """Bytes of pushes, each followed by reads of a page of the newest versions and of the previous version."""
    watched.nbytes.clear()
    for _ in range(PUSHES):
        number = push(heads)
        page = history_of(heads).newest(50)
        assert [found.number for found in page] == list(range(number, number - 50, -1))
        assert history_of(heads).durable(number - 1) == entry(number - 1)
    return watched.nbytes.copy()


def test_a_push_reads_and_writes_as_many_bytes_late_in_a_history_as_early(watched: Watched) -> None:
    heads = HeadStore(watched)
    push_many(heads, 100)
    early = cost_of_pushes(watched, heads)
    push_many(heads, VERSIONS - 100 - PUSHES)
    late = cost_of_pushes(watched, heads)
    for what in ("read", "written"):
        assert late[what] <= BOUND * early[what], (what, early, late)
    assert len(watched.get(SMOL.head_key)[0]) < 20_000
    assert len(history_of(heads).versions()) == VERSIONS + PUSHES


def test_a_process_that_has_just_started_reads_no_more_than_its_page_and_the_way_there(
    watched: Watched,
) -> None:
    push_many(HeadStore(watched), VERSIONS)
    watched.calls.clear()
    page = history_of(HeadStore(watched)).newest(100, VERSIONS // 2)
    assert [found.number for found in page] == list(range(VERSIONS // 2 - 1, VERSIONS // 2 - 101, -1))
    assert watched.calls["get"] <= 1 + 2 + 3, "the head, inner nodes, and leaves of 64 versions"
    watched.calls.clear()
    assert history_of(HeadStore(watched)).durable(7) == entry(7)
    assert watched.calls["get"] <= 1 + 3


def test_a_history_that_is_retired_and_forgotten_at_once_leaves_a_short_head_and_no_tree(
    watched: Watched,
) -> None:
    heads = HeadStore(watched)
    push_many(heads, VERSIONS)
    numbers = range(1, VERSIONS)
    heads.edit(SMOL, lambda history: (delete_versions(history, numbers, 5), None))
    assert len(watched.get(SMOL.head_key)[0]) < 20_000
    found = stored(watched, SMOL)
    assert list(found.versions()) == [VERSIONS]
    assert found.retired() == {number: replace(entry(number), retired_ms=5) for number in numbers}
    heads.edit(SMOL, lambda history: (forget_versions(history, numbers), None))
    found = stored(watched, SMOL)
    assert (list(found.versions()), found.retired(), found.head.root) == ([VERSIONS], {}, None)
    assert len(watched.get(SMOL.head_key)[0]) < 20_000


def test_due_versions_are_found_without_reading_the_others(watched: Watched) -> None:
    heads = HeadStore(watched)
    push_many(heads, VERSIONS)
    heads.edit(SMOL, lambda history: (delete_versions(history, [70, 71], 5), None))
    push_many(heads, 2 * MOST_RECENT)  # so that these have got into the tree
    fresh = history_of(HeadStore(watched))
    watched.calls.clear()
    assert list(fresh.retired()) == [70, 71]
    assert watched.calls["get"] <= 3, "one node of each level"


# --- what becomes of a version when it gets into the tree -----------------------------------------------------------


def test_a_version_can_be_published_again_by_its_writer_and_nobody_else_after_it_has_got_into_the_tree(
    watched: Watched,
) -> None:
    heads = HeadStore(watched)
    push_many(heads, 3 * MOST_RECENT)
    assert 5 not in history_of(heads).head.recent
    before = watched.get(SMOL.head_key)
    heads.edit(SMOL, lambda history: (publish(history, entry(5)), None))
    with pytest.raises(AlreadyExists):
        heads.edit(SMOL, lambda history: (publish(history, replace(entry(5), write_id="other")), None))
    assert watched.get(SMOL.head_key) == before


def test_a_tag_may_name_a_version_in_the_tree_and_keeps_it_there(watched: Watched) -> None:
    heads = HeadStore(watched)
    push_many(heads, 3 * MOST_RECENT)
    heads.edit(SMOL, lambda history: (set_ref(history, "prod", 5), None))
    push_many(heads, 3 * MOST_RECENT)
    assert stored(watched, SMOL).head.ref_numbers == {"prod": 5, "latest": 6 * MOST_RECENT}
    with pytest.raises(FailedPrecondition, match="is the target of prod"):
        heads.edit(SMOL, lambda history: (delete_versions(history, [5], 5), None))


# --- crashes, rivals and readers with old heads ---------------------------------------------------------------------


class Killed(BaseException):
    """The process ended here."""


def test_a_writer_that_is_killed_anywhere_leaves_a_history_that_can_be_read_and_gone_on_with(
    tmp_path: Path,
) -> None:
    """Killed at its first call while the head and the tree change, at its second, and so on, until one comes
    through.
    """
    left_nodes = 0
    for at in itertools.count():
        store = Watched(tmp_path / str(at))
        heads = HeadStore(store)
        push_many(heads, 300)
        heads.update(SMOL, lambda head: (mark_history(head, 1), None))
        before = stored(store, SMOL).versions()
        calls = itertools.count()

        def kill(verb: str, key: str, at: int = at, calls: Iterator[int] = calls) -> None:
            if next(calls) >= at:
                raise Killed

        store.before = kill
        try:
            HeadStore(store).edit(SMOL, lambda history: (delete_versions(history, range(1, 290, 3), 5), None))
            came_through = True
        except Killed:
            came_through = False
        store.before = lambda _verb, _key: None
        found = stored(store, SMOL)
        retired = set(range(1, 290, 3)) if came_through else set()
        assert set(found.retired()) == retired
        assert set(found.versions()) == set(before) - retired
        left_nodes += nodes_in(store) > tree_in(store)
        push_many(HeadStore(store), 2 * MOST_RECENT)
        assert set(stored(store, SMOL).versions()) == (set(before) - retired) | set(range(301, 365))
        collect_twice(store)
        assert nodes_in(store) == tree_in(store), "what the killed writer has left is gone"
        if came_through:
            break
    assert left_nodes > 3, "there are that many nodes to be killed behind"


def collect_twice(store: ObjectStore) -> None:
    """Collect, and again after the grace times."""
    now_ms = 10**9
    for _ in range(3):
        report = collect(store, HeadStore(store), SMOL, grace=GRACE, clock=lambda: now_ms)  # noqa: B023
        assert report.problems == ()
        now_ms += GRACE.ms


def test_two_replicas_that_change_the_tree_at_once_lose_nothing_of_each_other(watched: Watched) -> None:
    first, second = HeadStore(watched), HeadStore(watched)
    push_many(first, 10 * MOST_RECENT)
    rivals = [
        lambda history: (delete_versions(history, range(100, 200), 7), None),
        lambda history: (publish_next(history), None),
    ]

    def come_between(verb: str, key: str) -> None:
        # behind the nodes of the first, and before its head
        if verb == "put" and key == SMOL.head_key and rivals:
            assert nodes_in(watched) > tree_in(watched)
            second.edit(SMOL, rivals.pop(0))

    watched.before = come_between
    first.edit(SMOL, lambda history: (delete_versions(history, range(1, 150), 5), None))
    assert not rivals
    watched.before = lambda _verb, _key: None
    found = stored(watched, SMOL)
    times = {number: there.retired_ms for number, there in found.retired().items()}
    assert times == dict.fromkeys(range(1, 100), 5) | dict.fromkeys(range(100, 200), 7)
    assert set(found.versions()) == set(range(200, 10 * MOST_RECENT + 2))
    collect_twice(watched)
    assert nodes_in(watched) == tree_in(watched), "nodes of edits that came to nothing are gone"


def publish_next(history: History) -> Head:
    head, number = opened(history.head)
    head = claim_version(head, number, entry(number).write_id)
    return publish(history.under(head), entry(number))


def test_a_writer_that_was_stalled_beyond_every_collection_writes_no_head_that_leads_nowhere(
    watched: Watched,
) -> None:
    """The writer has written its nodes, and wakes up after others have changed the head and collected twice."""
    heads = HeadStore(watched)
    push_many(heads, 300)
    stalls = [True]

    def stall(verb: str, key: str) -> None:
        if verb == "put" and key == SMOL.head_key and stalls:
            stalls.clear()
            push_many(HeadStore(watched), 2 * MOST_RECENT)
            before = nodes_in(watched)
            collect_twice(watched)
            assert before > nodes_in(watched) == tree_in(watched)

    watched.before = stall
    heads.edit(SMOL, lambda history: (delete_versions(history, range(1, 200), 5), None))
    found = stored(watched, SMOL)
    assert (len(found.retired()), len(found.versions())) == (199, 300 + 2 * MOST_RECENT - 199)


def test_nodes_of_before_stay_for_the_grace_time_and_readers_of_before_go_on_without_them(
    watched: Watched,
) -> None:
    heads = HeadStore(watched)
    push_many(heads, 300)
    now_ms = 10**6
    old = stored(watched, SMOL)

    def gather() -> None:
        collect(watched, heads, SMOL, grace=GRACE, clock=lambda: now_ms)

    gather()
    before = tree_in(watched)
    heads.edit(SMOL, lambda history: (delete_versions(history, range(1, 200), now_ms), None))
    gather()
    now_ms += GRACE.ms - 1
    gather()
    assert before <= nodes_in(watched)
    assert set(old.versions()) == set(range(1, 301)), "as it was when the head was read"
    now_ms += 1
    gather()
    assert not before <= nodes_in(watched)
    fresh = stored(watched, SMOL)
    stale = HeadStore(watched).history_of(SMOL, old.head)  # one that has read no node in time
    assert stale.find(250) == entry(250)
    assert set(stale.versions()) == set(fresh.versions()) == set(range(200, 301))
    assert stale.head == old.head


def test_a_node_that_is_lost_is_data_loss_by_name_and_stops_nothing_that_does_without_it(
    watched: Watched,
) -> None:
    push_many(HeadStore(watched), 300)
    root = stored(watched, SMOL).head.root
    assert root is not None
    watched.delete(node_key(SMOL, root.name))
    heads = HeadStore(watched)
    for use in (
        lambda: history_of(heads).find(5),
        lambda: heads.edit(SMOL, lambda history: (delete_versions(history, [5], 5), None)),
    ):
        with pytest.raises(DataLoss, match="is missing from the store"):
            use()
    assert push(heads) == 301
    assert [found.number for found in history_of(heads).newest(3)] == [301, 300, 299]
    with pytest.raises(DataLoss, match="is missing from the store"):
        collect(watched, heads, SMOL, grace=GRACE, clock=lambda: 10**9)


def test_a_store_that_takes_no_nodes_for_a_while_delays_a_change_and_one_that_never_does_refuses_it(
    watched: Watched,
) -> None:
    push_many(HeadStore(watched), 300)
    before = watched.get(SMOL.head_key)
    refusals = [3]

    def refuse(verb: str, key: str) -> None:
        if verb == "put" and node_of_key(SMOL, key) is not None and refusals[0]:
            refusals[0] -= 1
            raise Unavailable("no answer")

    watched.before = refuse
    change = partial(lambda ms, history: (delete_versions(history, range(1, 200), ms), None), 5)
    HeadStore(watched).edit(SMOL, change)
    assert (refusals[0], len(stored(watched, SMOL).retired())) == (0, 199)
    before = watched.get(SMOL.head_key)
    refusals[0] = 10**9
    with pytest.raises(Unavailable, match="no answer"):
        HeadStore(watched, patience_s=0.1).edit(
            SMOL, lambda history: (delete_versions(history, range(200, 290), 5), None)
        )
    assert watched.get(SMOL.head_key) == before


# --- a newer release beside this one --------------------------------------------------------------------------------


def newer_release(store: ObjectStore, change: Callable[[dict[str, Any]], object]) -> None:
    """A write by a program that knows more than this one, as it would be by that one's code."""
    while True:
        text, etag = store.get(SMOL.head_key)
        document = json.loads(text)
        change(document)
        document["generation"] += 1
        try:
            store.put(SMOL.head_key, text_of(document), mode=IfMatch(etag))
        except Conflict:
            continue
        return


def test_what_a_newer_release_has_written_stays_whatever_this_one_does(watched: Watched) -> None:
    heads = HeadStore(watched)
    push_many(heads, 5)
    heads.edit(SMOL, lambda history: (set_ref(set_tagged(set_tagged(history)), "prod", 2), None))
    heads.update(SMOL, lambda head: (give_up_version(head, 7, "no more", 5, aborted=True), None))

    def add(document: dict[str, Any]) -> None:
        document["candidates"] = {"3": {"approved_by": ["kim"]}}
        document["recent"][2]["parts"] = {"optimizer": {"nbytes": 7}}
        document["refs"]["prod"]["note"] = "π"
        document["open"][0]["holders"] = ["a", "b"]
        document["retention"]["keep_best"] = 3
        document["failed"][0] |= {"state": "rejected", "rejected_by": ["kim"]}

    newer_release(watched, add)
    heads.update(SMOL, lambda head: (keep(head, Retention(keep_last=10**6)), None))
    heads.update(SMOL, lambda head: (claim_version(head, 6, "someone"), None))
    heads.edit(SMOL, lambda history: (set_ref(history, "prod", 4), None))
    heads.edit(SMOL, lambda history: (delete_versions(history, [3], 9), None))
    push_many(heads, 3 * MOST_RECENT)
    collect_report = collect(watched, heads, SMOL, grace=GRACE, clock=lambda: 10)
    assert collect_report.problems == ()
    document = json.loads(watched.get(SMOL.head_key)[0])
    assert document["candidates"] == {"3": {"approved_by": ["kim"]}}
    assert document["refs"]["prod"] == {"version": 4, "note": "π"}
    assert document["retention"]["keep_best"] == 3
    (failed,) = document["failed"]
    assert (failed["number"], failed["state"], failed["rejected_by"]) == (7, "rejected", ["kim"])
    assert not stored(watched, SMOL).head.failed[7].aborted, "a state that is not known counts as failed"
    (still_open,) = (there for there in document["open"] if there["number"] == 6)
    assert (still_open["holders"], still_open["claim"]) == (["a", "b"], "someone")
    assert 3 not in {there["number"] for there in document["recent"]}, "it has got into the tree"
    found = stored(watched, SMOL).find(3)
    assert found == replace(entry(3), retired_ms=9, extra={"parts": {"optimizer": {"nbytes": 7}}})


def set_tagged(history: History) -> History:
    """With one more version open."""
    return history.under(opened(history.head)[0])


def test_a_feature_that_this_release_lacks_is_refused_by_name_and_nothing_is_written(
    watched: Watched,
) -> None:
    heads = HeadStore(watched)
    push_many(heads, 5)
    newer_release(watched, lambda document: document.update(requires=["approval"]))
    before = watched.get(SMOL.head_key)
    for use in (
        lambda: heads.read(SMOL),
        lambda: push(heads),
        lambda: collect(watched, heads, SMOL, grace=GRACE, clock=lambda: 10),
    ):
        with pytest.raises(FailedPrecondition, match="requires 'approval'") as caught:
            use()
        assert caught.value.fix == "use a newer Weighbridge"
    assert watched.get(SMOL.head_key) == before
    newer_release(watched, lambda document: document.update(requires=[]))
    assert push(heads) == 6


def test_two_releases_push_to_one_model_side_by_side(watched: Watched) -> None:
    heads = HeadStore(watched)
    push_many(heads, 1)
    for i in range(2 * MOST_RECENT):
        newer_release(watched, lambda document, i=i: document.update(signed=i))  # type: ignore[misc]
        assert push(heads) == i + 2
        assert json.loads(watched.get(SMOL.head_key)[0])["signed"] == i
    assert set(stored(watched, SMOL).versions()) == set(range(1, 2 * MOST_RECENT + 2))


# --- many models ----------------------------------------------------------------------------------------------------

REGISTRATION = {
    "model_type": "llama",
    "dtype": "BF16",
    "tensor_count": 1,
    "tensor_bytes": 2,
    "files": [],
    "dtypes": {},
    "absent": [],
    "block": [128, 128],
}


def register_models(store: ObjectStore, names: Iterable[ModelName]) -> None:
    text = replace(register(Head(), "f", REGISTRATION), generation=1).to_json()
    for name in names:
        store.put(name.head_key, text, mode="create")


def test_a_page_of_models_reads_its_own_heads_and_no_others(watched: Watched) -> None:
    def cost() -> tuple[Counter[str], list[str]]:
        watched.calls.clear()
        page = Catalog(watched).list_models("acme/m0009", 20)
        return watched.calls.copy(), [model.name for model in page]

    register_models(watched, [ModelName("acme", f"m{i:04d}") for i in range(100)])
    few = cost()
    register_models(watched, [ModelName("acme", f"m{i:04d}") for i in range(100, 1000)])
    assert cost() == few == (Counter(get=20), [f"acme/m{i:04d}" for i in range(10, 30)])


def test_pages_of_models_leave_none_out_and_name_none_twice(watched: Watched) -> None:
    # as text, "a-b/x" comes before "a/x"
    models = [ModelName(namespace, name) for namespace in ("a", "a-b", "a.c", "b") for name in ("m", "m-1", "x")]
    register_models(watched, models)
    watched.put("models/a/headless/files/x", b"", mode="create")
    watched.put("models/a/damaged/head.json", b"{", mode="create")
    watched.put("models/a/older/head.json", b'{"format": 2}', mode="create")
    catalog, found = Catalog(watched), list[str]()
    while page := catalog.list_models(found[-1] if found else "", 2):
        assert len(page) <= 2
        found += [model.name for model in page]
    assert found == [str(model) for model in sorted(models)]
