"""Is every outcome that a store on S3 reports the true one, whatever goes wrong on the way to the server and back?

``WEIGHBRIDGE_S3_FAULTS=500`` makes as many random runs; ``WEIGHBRIDGE_SEED`` chooses the first one's seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator

import pytest

from tests.support.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.support.rounds import first_seed, rounds
from tests.support.s3_server import S3Server
from weighbridge.errors import Conflict, DataLoss, DeadlineExceeded, NotFound, Unavailable
from weighbridge_storage.stores.objects import IfMatch, ObjectStore, PutMode
from weighbridge_storage.stores.s3.settings import SMALLEST_PART, S3Settings
from weighbridge_storage.stores.s3.store import S3Store

RUNS = rounds("S3_FAULTS")
FIRST_SEED = first_seed()
WRITERS = 3
LARGE = SMALLEST_PART + 1_000_000


@pytest.fixture(scope="module")
def proxy(seaweed: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
def settings(seaweed: S3Server) -> S3Settings:
    return seaweed.settings(part_bytes=SMALLEST_PART, attempts=4, read_timeout_s=10.0)


@pytest.fixture
def honest(settings: S3Settings) -> Iterator[S3Store]:
    """The store, reached directly."""
    opened = S3Store(settings)
    yield opened
    opened.close()


@pytest.fixture
def faulty(settings: S3Settings, proxy: FaultProxy) -> Iterator[S3Store]:
    """The same store, reached through the proxy."""
    opened = S3Store(through(settings, proxy))
    yield opened
    proxy.wait_until_quiet()
    opened.close()


def through(settings: S3Settings, proxy: FaultProxy) -> S3Settings:
    return dataclasses.replace(settings, endpoint=proxy.endpoint)


def large(seed: int) -> bytes:
    return random.Random(seed).randbytes(LARGE)


# --- one fault at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["slow", "refused", "slow-down", "reset", "lost", "lost-500"])
def test_a_conditional_write_is_done_once_in_spite_of_a_fault(
    faulty: S3Store, honest: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.script = [fault]
    first = faulty.put("k", b"1", mode="create")
    assert honest.get("k") == (b"1", first)
    proxy.script = [fault]
    second = faulty.put("k", b"2", mode=IfMatch(first))
    assert honest.get("k") == (b"2", second)
    proxy.script = [fault]
    with pytest.raises((Conflict, DeadlineExceeded)):
        faulty.put("k", b"3", mode=IfMatch(first))
    assert honest.get("k") == (b"2", second)


@pytest.mark.parametrize("fault", ["reset", "lost", "late"])
@pytest.mark.parametrize("request_number", range(4))
def test_a_write_in_parts_is_done_once_in_spite_of_a_fault(
    faulty: S3Store, honest: S3Store, proxy: FaultProxy, fault: Fault, request_number: int
) -> None:
    data = large(1)
    none: list[Fault] = ["none"]
    proxy.script = [*none * request_number, fault]
    etag = faulty.put("k", data, mode="create")
    proxy.wait_until_quiet()
    assert honest.get("k") == (data, etag)


def test_a_write_whose_fate_cannot_be_found_out_is_not_reported_as_either(
    faulty: S3Store, honest: S3Store, proxy: FaultProxy
) -> None:
    proxy.script = ["lost"] * 4 + ["reset"] * 4
    with pytest.raises(DeadlineExceeded, match="outcome is unknown") as caught:
        faulty.put("k", b"1", mode="create")
    assert caught.value.fix
    assert honest.get("k")[0] == b"1"


def test_a_write_that_lands_after_the_store_has_given_up_is_not_reported_as_refused(
    faulty: S3Store, honest: S3Store, proxy: FaultProxy
) -> None:
    for number in range(3):
        proxy.script = ["late"] * 4
        with contextlib.suppress(DeadlineExceeded):
            etag = faulty.put(f"k{number}", b"1", mode="create")
            assert etag == honest.get(f"k{number}")[1]
        proxy.wait_until_quiet()
        assert honest.get(f"k{number}")[0] == b"1"


def test_a_write_that_others_replaced_before_it_could_be_looked_at_is_not_called_a_conflict(
    faulty: S3Store, honest: S3Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = honest.put("k", b"1", mode="create")
    proxy.script = ["lost"]
    head = faulty._client.head

    def replace_then_look(name: str) -> object:
        honest.put("k", b"3", mode="overwrite")
        return head(name)

    monkeypatch.setattr(faulty._client, "head", replace_then_look)
    with pytest.raises(DeadlineExceeded):
        faulty.put("k", b"2", mode=IfMatch(first))


def test_bodies_cut_short_are_read_again(faulty: S3Store, honest: S3Store, proxy: FaultProxy) -> None:
    data = large(2)
    honest.put("k", data, mode="create")
    proxy.script = ["truncated"] * 3
    assert faulty.get("k")[0] == data
    proxy.script = ["truncated"] * 3
    assert faulty.read_range("k", 7, 100_000) == data[7:100_007]
    proxy.script = ["none", "truncated", "truncated"]
    assert b"".join(faulty.stream("k")) == data


def test_bodies_always_cut_short_are_said_to_be(faulty: S3Store, honest: S3Store, proxy: FaultProxy) -> None:
    honest.put("k", b"0123456789", mode="create")
    proxy.script = ["truncated"] * 6
    with pytest.raises(Unavailable, match="reading k failed: the body"):
        faulty.get("k")
    proxy.script.clear()
    assert faulty.get("k")[0] == b"0123456789"


def test_a_server_that_is_gone_is_said_to_be(aws_environment: None) -> None:
    gone = S3Store(S3Settings("b", endpoint="http://127.0.0.1:9", region="us-east-1", attempts=2))
    for use in (
        lambda: gone.get("k"),
        lambda: gone.size("k"),
        lambda: list(gone.list("")),
        lambda: gone.delete("k"),
    ):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            use()
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:9"):
        gone.put("k", b"", mode="create")
    gone.close()


# --- any number of faults -------------------------------------------------------------------------------------------


class Witness:
    """Client of a store that fails, which records the reported outcome of each write.

    Attributes:
        said: outcomes by the written content's id: ``done``, ``refused`` (nothing was written) or ``unknown``.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.said: dict[str, str] = {}

    def put(self, key: str, name: str, data: bytes | list[bytes], mode: PutMode) -> str:
        """Write an object; returns the outcome that the store reports."""
        try:
            self.store.put(key, data, mode=mode)
            answer = "done"
        except (Conflict, Unavailable):
            answer = "refused"
        except DeadlineExceeded:
            answer = "unknown"
        self.said[name] = answer
        return answer

    def append(self, key: str, name: str) -> None:
        """Append a line to a list by compare-and-swap; try again after a refusal."""
        for attempt in range(10):
            line = f"{name}.{attempt}"
            try:
                text, etag = self.store.get(key)
                mode: PutMode = IfMatch(etag)
            except NotFound:
                text, mode = b"", "create"
            except (Unavailable, DataLoss):
                continue
            if self.put(key, line, text + line.encode() + b"\n", mode) != "refused":
                return

    def check_list(self, text: str) -> None:
        """A list has every line whose writing was reported, once, and none whose writing was refused."""
        lines = text.splitlines()
        assert len(lines) == len(set(lines)), "a write was made twice"
        for line, answer in self.said.items():
            if answer == "done":
                assert line in lines, f"the write of {line} was reported and is lost"
            if answer == "refused":
                assert line not in lines, f"the write of {line} was refused and is there"


def found_or_none(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)[0]
    except NotFound:
        return None


def check_race(
    store: ObjectStore, key: str, said: dict[str, str], contents: dict[str, bytes], most_winners: int = 1
) -> None:
    """Of the writers that race for an object, one that reported success wrote it, and no refused writer did."""
    content = found_or_none(store, key)
    winners = [name for name, answer in said.items() if answer == "done"]
    possible = [name for name, answer in said.items() if answer != "refused"]
    assert len(winners) <= most_winners
    if content is None:
        assert not winners
    else:
        assert content in [contents[name] for name in winners or possible]


def work(number: int, seed: int, store: ObjectStore, notes: dict[str, Witness]) -> None:
    dice = random.Random(seed * 1000 + number)
    mine = f"{seed}-{number}"
    for round_ in range(2):
        notes["list"].append("list", f"{mine}-{round_}")
    notes["small"].put("small", mine, mine.encode(), "create")
    content = large(seed * 10 + number)
    notes["large"].put("large", mine, [content[: LARGE // 2], content[LARGE // 2 :]], "create")
    notes["own"].put(f"own/{mine}", mine, content, "overwrite")
    for _ in range(3):
        start = dice.randrange(LARGE)
        length = dice.randrange(LARGE - start)
        expected = large(seed)
        try:
            assert store.read_range("known", start, length) == expected[start : start + length]
            assert b"".join(store.stream("known")) == expected
            assert store.get("known")[0] == expected
            assert store.size("known") == LARGE
            assert "known" in set(store.list(""))
        except (Unavailable, DataLoss):
            continue
    try:
        store.copy("known", f"copy/{mine}")
        notes["copy"].said[mine] = "done"
    except DeadlineExceeded:
        notes["copy"].said[mine] = "unknown"
    except Unavailable:
        notes["copy"].said[mine] = "refused"


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_no_outcome_is_reported_wrongly_under_random_faults(
    settings: S3Settings, honest: S3Store, proxy: FaultProxy, seed: int
) -> None:
    honest.put("known", large(seed), mode="create")
    proxy.dice.seed(seed)
    proxy.rate = random.Random(seed).choice([0.05, 0.2, 0.4])
    stores = [S3Store(through(settings, proxy)) for _ in range(WRITERS)]
    notes = [{name: Witness(store) for name in ("list", "small", "large", "own", "copy")} for store in stores]
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number, seed, stores[number], notes[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.rate = 0.0
    proxy.wait_until_quiet()
    for store in stores:
        store.close()
    assert failures == []

    text = found_or_none(honest, "list") or b""
    said: dict[str, dict[str, str]] = {name: {} for name in notes[0]}
    for note in notes:
        note["list"].check_list(text.decode())
        for name, witness in note.items():
            said[name].update(witness.said)
    contents = {f"{seed}-{n}": large(seed * 10 + n) for n in range(WRITERS)}
    check_race(honest, "small", said["small"], {name: name.encode() for name in contents})
    # SeaweedFS 4.48 lets uploads win together whose last requests come within a millisecond: conditions are for small
    # objects
    check_race(honest, "large", said["large"], contents, most_winners=WRITERS)
    for name, answer in said["own"].items():
        expected = {"done": [contents[name]], "refused": [None], "unknown": [contents[name], None]}
        assert found_or_none(honest, f"own/{name}") in expected[answer]
    for name, answer in said["copy"].items():
        expected = {"done": [large(seed)], "refused": [None], "unknown": [large(seed), None]}
        assert found_or_none(honest, f"copy/{name}") in expected[answer]
    honest.discard_unfinished("", older_than_s=0.0)
    assert honest.discard_unfinished("", older_than_s=0.0) == 0, "an upload was left"
