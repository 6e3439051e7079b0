"""Are small calls answered in time, whatever the store does, and is what they say the truth?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gate import Gate
from tests.support.new_threads import NewThreads
from tests.support.ports import reserved_port
from tests.support.s3_server import S3Server
from tests.support.waiting import eventually
from weighbridge._core.resources import Retention
from weighbridge.errors import Conflict, DeadlineExceeded, NotFound, Unavailable
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import keep
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.breaker import Breaker
from weighbridge_storage.stores.guarded import GuardedStore
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import IfMatch, ObjectStore
from weighbridge_storage.stores.s3.settings import S3Settings
from weighbridge_storage.stores.s3.store import S3Store

PATIENCE = 1.0
THREADS = 4
NAME = ModelName("tests", "smol")


# --- the breaker ----------------------------------------------------------------------------------------------------

Event = tuple[int, str, int]
"""When; ``given up``, or how it ended: ``answered`` or ``away``; and when that call was made."""
PATIENT = 20


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Ends of calls, some of which were given up before they ended, in the order of time; each at another second."""
    events: list[Event] = []
    times = st.integers(0, 400)
    for asked in draw(st.lists(times, unique=True, max_size=15)):
        ends = asked + draw(st.integers(1, 3 * PATIENT))
        if ends > asked + PATIENT:
            events.append((asked + PATIENT, "given up", asked))
        events.append((ends, draw(st.sampled_from(["answered", "away"])), asked))
    return sorted({when: (when, what, asked) for when, what, asked in events}.values())


@given(histories())
def test_the_breaker_is_open_from_a_call_in_vain_among_no_answers_to_the_next_answer(
    events: list[Event],
) -> None:
    breaker = Breaker(PATIENT)
    for number, (now, what, asked) in enumerate(events, 1):
        breaker = breaker.given_up(asked, now) if what == "given up" else breaker.ended(asked, now, away=what == "away")
        answers = [
            when
            for when, what, asked in events[:number]
            if what == "answered" or (what == "away" and when - asked < PATIENT)
        ]
        in_vain = [
            (when, asked)
            for when, what, asked in events[:number]
            if what == "given up" and not any(answer > when - PATIENT / 2 for answer in answers)
        ]
        assert breaker.is_open == bool(in_vain)
        if in_vain:
            assert breaker.silence(now) == now - max([in_vain[0][1], *answers])
        else:
            assert breaker.silence(now) == 0


# --- a store that hangs ---------------------------------------------------------------------------------------------


class HungStore(LocalStore):
    """A folder whose calls a test can make hang, as on a network file system whose server is away.

    Attributes:
        hangs: whether calls for a key hang.
        count: number of calls that hang now.
        finished: calls that were carried out after they had hung.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.hangs: Callable[[str], bool] = lambda key: False
        self.count = 0
        self.finished: list[str] = []
        self._changed = threading.Condition()

    def release(self) -> None:
        with self._changed:
            self.hangs = lambda key: False
            self._changed.notify_all()

    def _pass(self, key: str) -> None:
        with self._changed:
            if self.hangs(key):
                self.count += 1
                self._changed.wait_for(lambda: not self.hangs(key))
                self.count -= 1
                self.finished.append(key)

    def get(self, key: str) -> tuple[bytes, str]:
        self._pass(key)
        return super().get(key)

    def size(self, key: str) -> int:
        self._pass(key)
        return super().size(key)

    def put(self, key: str, data: Any, *, mode: Any) -> str:
        self._pass(key)
        return super().put(key, data, mode=mode)

    def delete(self, key: str) -> None:
        self._pass(key)
        super().delete(key)

    def list(self, prefix: str) -> Iterator[str]:
        for key in super().list(prefix):
            self._pass(key)
            yield key


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungStore]:
    store = HungStore(tmp_path / "store")
    store.put("there", b"1", mode="create")
    yield store
    store.release()


@pytest.fixture
def guarded(hung: HungStore) -> Iterator[GuardedStore]:
    with guard(hung, PATIENCE) as store:
        yield store


@contextmanager
def guard(hung: HungStore, patience: float) -> Iterator[GuardedStore]:
    store = GuardedStore(hung, patience, threads=THREADS)
    try:
        yield store
    finally:
        hung.release()
        store.close()


def everything(key: str) -> bool:
    return True


def is_refused(store: ObjectStore) -> bool:
    try:
        store.size("there")
    except Unavailable as error:
        return "not tried" in error.message
    return False


def test_a_read_that_hangs_is_given_up_and_then_reads_are_refused_until_the_store_answers(
    hung: HungStore, guarded: GuardedStore
) -> None:
    since = NewThreads()
    assert guarded.get("there")[0] == b"1"
    hung.hangs = everything
    with pytest.raises(Unavailable, match="reading there failed: the object store has not answered for"):
        guarded.get("there")
    assert hung.count >= 1
    with pytest.raises(Unavailable, match="reading the size of there was not tried") as caught:
        guarded.size("there")
    assert caught.value.fix
    hung.release()
    # without anybody going ahead: it is the guard that asks
    eventually(lambda: not guarded._asking)
    assert guarded.get("there")[0] == b"1"
    eventually(lambda: not since.named("store-watch"))


def test_nobody_is_sent_ahead_while_the_store_hangs(hung: HungStore, guarded: GuardedStore) -> None:
    hung.hangs = everything
    with pytest.raises(Unavailable):
        guarded.get("there")
    eventually(lambda: hung.count == 2)  # that call, and the guard's own question
    until = time.monotonic() + 3 * PATIENCE
    while time.monotonic() < until:
        assert is_refused(guarded)
        assert hung.count == 2
        time.sleep(0.01)


def test_calls_to_a_store_that_hangs_keep_few_threads_and_let_go_of_all_callers(
    hung: HungStore, guarded: GuardedStore
) -> None:
    hung.hangs = everything
    since = NewThreads()
    with ThreadPoolExecutor(50) as pool:
        calls = [pool.submit(guarded.get, "there") for _ in range(200)]
        assert all(isinstance(call.exception(60), Unavailable) for call in calls)
    assert len(since.named("store-call")) <= THREADS
    assert hung.count <= THREADS + 1
    hung.release()
    eventually(lambda: hung.count == 0 and not guarded._asking)
    assert guarded.get("there")[0] == b"1"
    # of those that found no thread, none was made after its caller had gone
    assert hung.finished.count("there") <= THREADS


def test_an_object_that_hangs_alone_opens_nothing(hung: HungStore, guarded: GuardedStore) -> None:
    guarded.put("other", b"2", mode="create")
    hung.hangs = lambda key: key == "there"
    errors: list[Unavailable] = []

    def read() -> None:
        try:
            guarded.get("there")
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until = time.monotonic() + 3 * PATIENCE
    while time.monotonic() < until:
        assert guarded.get("other")[0] == b"2"
        time.sleep(0.01)
    thread.join(60)
    assert len(errors) == 1


def test_a_write_that_hangs_is_neither_reported_as_done_nor_as_refused_and_may_land(
    hung: HungStore, guarded: GuardedStore
) -> None:
    hung.hangs = lambda key: key != "probe/nothing"
    with pytest.raises(DeadlineExceeded, match="writing new: its outcome is unknown"):
        guarded.put("new", b"2", mode="create")
    hung.release()
    eventually(lambda: "new" in hung.finished)
    eventually(lambda: _found(hung, "new") == b"2")


def test_a_write_that_is_refused_is_never_made(hung: HungStore, guarded: GuardedStore) -> None:
    hung.hangs = everything
    outcomes: dict[str, type[BaseException] | None] = {}

    def write(number: int) -> None:
        try:
            guarded.put(f"new/{number}", b"2", mode="create")
        except (Unavailable, DeadlineExceeded) as error:
            outcomes[f"new/{number}"] = type(error)

    with ThreadPoolExecutor(3 * THREADS) as pool:
        list(pool.map(write, range(3 * THREADS)))
    write(1000)
    assert len(outcomes) == 3 * THREADS + 1
    refused = {key for key, error in outcomes.items() if error is Unavailable}
    assert len(refused) == 2 * THREADS + 1
    hung.release()
    eventually(lambda: hung.count == 0 and not guarded._asking)
    guarded.put("last", b"", mode="create")
    eventually(lambda: set(hung.list("new/")) == outcomes.keys() - refused)
    assert not refused & set(hung.finished)


def test_what_a_caller_may_change_is_written_before_the_caller_goes_on(hung: HungStore, guarded: GuardedStore) -> None:
    hung.hangs = lambda key: key == "slow"
    threading.Timer(2 * PATIENCE, hung.release).start()
    data = bytearray(b"2" * 1000)
    etag = guarded.put("slow", data, mode="create")
    assert hung.get("slow") == (b"2" * 1000, etag)


def test_what_the_store_says_comes_through(guarded: GuardedStore) -> None:
    etag = guarded.put("k", b"1", mode="create")
    with pytest.raises(Conflict):
        guarded.put("k", b"2", mode="create")
    assert guarded.put("k", b"1", mode=IfMatch(etag)) == guarded.get("k")[1]
    assert guarded.read_range("k", 0, 1) == b"1"
    assert guarded.modified_ms("k") > 0
    guarded.delete("k")
    with pytest.raises(NotFound):
        guarded.get("k")


def test_a_listing_is_whole_and_given_up_where_it_hangs(hung: HungStore) -> None:
    keys = {f"many/{number:04}/x" for number in range(2100)}
    for key in keys:
        hung.put(key, b"", mode="create")
    seen: set[str] = set()
    last = list(hung.list("many/"))[-1]
    # a busy machine may take a second to list so many
    with guard(hung, 5 * PATIENCE) as guarded:
        assert set(guarded.list("many/")) == keys
        assert set(guarded.folders("many/")) == {key.split("/")[1] for key in keys}
        assert set(guarded.list("none/")) == set()
        hung.hangs = lambda key: key == last
        with pytest.raises(Unavailable, match="listing 'many/' failed"):
            seen.update(guarded.list("many/"))
    assert len(seen) == 2000


def test_a_head_is_changed_once_although_its_write_was_given_up_and_landed_later(
    hung: HungStore, guarded: GuardedStore
) -> None:
    heads = HeadStore(guarded, patience_s=60.0)
    heads.update(NAME, lambda head: (keep(head, Retention(keep_last=3)), None), create=True)
    changes: list[int] = []

    def change(head: Head) -> tuple[Head, int]:
        changes.append(head.generation)
        return keep(head, Retention(keep_last=7)), head.generation

    hung.hangs = lambda key: key == NAME.head_key and bool(changes)
    with ThreadPoolExecutor(1) as pool:
        edit = pool.submit(heads.update, NAME, change)
        eventually(lambda: hung.count > 0)
        # the write was given up: no call is made, or one that asks what came of it hangs, too
        eventually(lambda: guarded.silent_seconds > 0 or hung.count > 1)
        hung.release()
        generation = edit.result(60)
    found = HeadStore(hung).read(NAME)
    assert found is not None
    assert found[0].retention.keep_last == 7
    assert found[0].generation == generation + 1


# --- over S3 --------------------------------------------------------------------------------------------------------


def test_a_store_on_s3_whose_answers_are_held_is_left_and_found_again(seaweed: S3Server) -> None:
    with Gate(seaweed.endpoint.removeprefix("http://")) as gate, ExitStack() as stack:
        direct = S3Store(seaweed.settings())
        stack.callback(direct.close)
        held = S3Store(seaweed.settings(prefix=direct._prefix, endpoint=f"http://{gate.address}"))
        stack.callback(held.close)
        guarded = GuardedStore(held.with_time_limit(PATIENCE), PATIENCE)
        stack.callback(guarded.close)
        etag = guarded.put("k", b"1", mode="create")
        eventually(lambda: guarded._threads._idle == guarded._threads._threads)  # its thread is free for the next call
        since = NewThreads()
        gate.hold_after(0)
        with pytest.raises(DeadlineExceeded):
            guarded.put("k", b"2", mode=IfMatch(etag))
        with pytest.raises(Unavailable, match="not tried"):
            guarded.get("k")
        # the server has carried it out; only its answer is held
        assert direct.get("k")[0] == b"2"
        # requests end by their own time limit, which is no answer of the store
        eventually(lambda: guarded._threads._idle == guarded._threads._threads)
        with pytest.raises(Unavailable, match="not tried"):
            guarded.get("k")
        assert not since.named("store-call")
        gate.open()
        eventually(lambda: not guarded._asking)
        assert guarded.get("k")[0] == b"2"


def test_a_server_that_refuses_connections_is_said_to_and_opens_nothing(aws_environment: None) -> None:
    port = reserved_port()
    gone = S3Store(S3Settings("b", endpoint=f"http://127.0.0.1:{port}", region="us-east-1"))
    guarded = GuardedStore(gone.with_time_limit(5.0), 5.0)
    for _ in range(3):
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            guarded.get("k")
    guarded.close()
    gone.close()


def _found(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)[0]
    except NotFound:
        return None
