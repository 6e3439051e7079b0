"""Are the contents of a namespace known without reading its heads, with concurrent writers and after any loss?"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.heads import Nodes, with_digest
from weighbridge._core.lru import Cache
from weighbridge.errors import DataLoss, FailedPrecondition
from weighbridge_storage.documents.entries import OpenEntry, Ref, VersionEntry
from weighbridge_storage.documents.names import ledger_key
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import delete_versions, forget_versions
from weighbridge_storage.head.ledger import Amount, Ledger, LedgerStore
from weighbridge_storage.stores.local import LocalStore


def entry(number: int, nbytes: int, retired_ms: int = 0) -> VersionEntry:
    return VersionEntry(number, number, "r", 1, nbytes, 1, "f", f"w{number}", retired_ms)


def opened(number: int, nbytes: int) -> OpenEntry:
    return OpenEntry(number, f"q{number}", number, "r", 1, 1, 2, "f", 0, nbytes=nbytes)


def published(head: Head, found: VersionEntry) -> Head:
    """A head with one more version."""
    return replace(
        head,
        generation=head.generation + 1,
        next_version=found.number + 1,
        recent={**head.recent, found.number: found},
        refs={"latest": Ref(found.number)},
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_model_holds_what_is_durable_retired_and_being_received_wherever_its_entries_are(seed: int) -> None:
    chance, nodes, known = random.Random(seed), Nodes(), Cache[int](10_000)
    head, there = Head(next_version=1), dict[int, int]()
    for _ in range(300):
        number, nbytes = head.next_version, chance.randint(1, 10**12)
        there[number] = nbytes
        head = published(head, entry(number, nbytes))
        gone = chance.choice(sorted(there))
        if gone != number and chance.random() < 0.6:
            head = delete_versions(nodes.history(head), [gone], 5)
            if chance.random() < 0.7:
                head = forget_versions(nodes.history(head), [gone])
                del there[gone]
        head = nodes.settle(replace(head, generation=head.generation + 1), most=8)
        assert nodes.history(head).nbytes(known) == sum(there.values())
    number = head.next_version
    head = replace(head, next_version=number + 1, open={number: opened(number, 7)})
    assert nodes.history(head).nbytes(known) == sum(there.values()) + 7


def test_of_a_history_that_was_summed_before_only_what_is_new_is_read() -> None:
    nodes, known = Nodes(), Cache[int](10_000)
    head = Head()
    for number in range(1, 1001):
        head = published(head, entry(number, 10))
        if number % 50 == 0:
            head = nodes.settle(head, most=8)
    total, first = nodes.loads(lambda: nodes.history(head).nbytes(known))
    again, second = nodes.loads(lambda: nodes.history(head).nbytes(known))
    assert total == again == 10_000
    assert len(first) > 16, "all leaves"
    assert len(second) < 16, "what the head says anew of numbers in the tree"


def test_a_newer_head_takes_the_place_of_an_older_one_and_never_the_other_way() -> None:
    ledger = Ledger().noted("smol", Amount(5, 100)).noted("other", Amount(1, 10))
    assert ledger.nbytes == 110
    assert ledger.noted("smol", Amount(4, 1)) == ledger.noted("smol", Amount(5, 1)) == ledger
    assert ledger.noted("smol", Amount(6, 0)).nbytes == 10


def test_a_count_leaves_what_was_noted_meanwhile_and_forgets_what_is_not_there() -> None:
    before = Ledger({"smol": Amount(5, 100), "gone": Amount(9, 50)})
    meanwhile = before.noted("smol", Amount(7, 300)).noted("new", Amount(1, 4))
    after = meanwhile.counted(before, {"smol": Amount(6, 200), "found": Amount(2, 1)}, 77)
    assert after == Ledger({"smol": Amount(7, 300), "new": Amount(1, 4), "found": Amount(2, 1)}, 77)


def test_a_ledger_is_read_as_it_was_written_with_what_a_later_release_adds() -> None:
    ledger = Ledger({"smol": Amount(5, 100)}, 77, {"later": [1]})
    assert Ledger.from_json(ledger.to_json(), "it") == ledger
    for data in (b"", b"{}", ledger.to_json().replace(b"100", b"101")):
        with pytest.raises(DataLoss):
            Ledger.from_json(data, "it")


def test_a_damaged_ledger_is_as_none_and_is_written_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(ledger_key("acme"), b"{]", mode="create")
    ledgers = LedgerStore(store)
    assert ledgers.read("acme") == Ledger()
    ledgers.update("acme", lambda ledger: ledger.noted("smol", Amount(1, 2)))
    assert ledgers.read("acme").nbytes == 2


def test_a_ledger_of_a_later_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    text = Ledger().to_json().partition(b',"digest"')[0].replace(b'"format":1', b'"format":2')
    store.put(ledger_key("acme"), with_digest(text + b"}"), mode="create")
    with pytest.raises(FailedPrecondition, match="reads format 1"):
        LedgerStore(store).update("acme", lambda ledger: ledger.noted("smol", Amount(1, 2)))


def test_of_many_that_write_at_one_time_none_is_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def write(name: str) -> None:
        ledgers = LedgerStore(store)
        for generation in range(1, 11):
            ledgers.update("acme", lambda ledger: ledger.noted(name, Amount(generation, generation)))  # noqa: B023 (it is called at once)

    threads = [threading.Thread(target=write, args=(f"model{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert LedgerStore(store).read("acme").amounts == {f"model{i}": Amount(10, 10) for i in range(6)}
