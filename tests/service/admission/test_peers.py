"""Who is told apart, how much may each host have, and whose turn is it?"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.errors import ResourceExhausted
from weighbridge_service.access.peer import LOCAL, Peer
from weighbridge_service.admission.quotas import HostQuota, may_have
from weighbridge_service.admission.rates import Rates
from weighbridge_service.admission.turns import Turns

HOSTS = ("a", "b", "c")
PEERS = [Peer(host, connection) for host in HOSTS for connection in ("1", "2")]


# --- who


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.7:41234", Peer("10.0.0.7", "41234")),
        ("ipv6:%5B::1%5D:41234", Peer("::1", "41234")),
        ("ipv6:[2001:db8::7]:1", Peer("2001:db8::7", "1")),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", Peer("fe80::1%eth0", "80")),
        ("unix:/run/weighbridge", Peer(LOCAL, "/run/weighbridge")),
        ("unix:", Peer(LOCAL, "")),
        ("unknown", Peer(LOCAL, "")),
        ("", Peer(LOCAL, "")),
    ],
)
def test_a_peer_is_read_as_grpc_names_it(text: str, peer: Peer) -> None:
    assert Peer.of_grpc(text) == peer


# --- how much


@given(
    total=st.integers(1, 60),
    asked=st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(1, 20)), max_size=60),
)
def test_no_host_can_shut_others_out(total: int, asked: list[tuple[str, int]]) -> None:
    held = Counter[str]()
    for host, more in asked:
        if not may_have(total, held.total(), held[host], more):
            continue
        held[host] += more
        assert held.total() <= total
        # whoever has more than a fourth has left a fourth free for others when it took it
        assert held[host] <= total / 4 or total - held.total() >= total // 4


@given(
    total=st.integers(4, 60),
    asked=st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(1, 20)), max_size=60),
    more=st.integers(1, 15),
)
def test_who_stays_within_a_fourth_gets_what_is_left(
    total: int, asked: list[tuple[str, int]], more: int
) -> None:
    held = Counter[str]()
    for host, wanted in asked:
        if may_have(total, held.total(), held[host], wanted):
            held[host] += wanted
    fits = more <= total // 4 and held.total() + more <= total
    assert may_have(total, held.total(), 0, more) or not fits


def test_one_host_alone_has_three_fourths_and_the_next_one_a_fourth() -> None:
    quota = HostQuota("places", 100)
    assert sum(quota.try_take("a") for _ in range(200)) == 75
    assert sum(quota.try_take("b") for _ in range(200)) == 25
    assert quota.held == 100
    quota.give("a", 50)
    assert sum(quota.try_take("c") for _ in range(200)) == 25
    assert sum(quota.try_take("a") for _ in range(200)) == 0


def test_what_is_taken_is_given_back_also_when_work_fails() -> None:
    quota = HostQuota("places", 8)

    def fail() -> None:
        with quota.taking("a", 2), quota.taking("b"):
            assert quota.held == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert quota.held == 0
    quota.take("a", 6)
    with pytest.raises(ResourceExhausted, match=r"6 of 8 places are taken, 6 of them by a") as refused:
        quota.take("a")
    assert refused.value.retry_after
    assert quota.held == 6


def test_threads_that_take_and_give_leave_nothing_taken() -> None:
    quota = HostQuota("places", 8)

    def work(host: str) -> None:
        for _ in range(2_000):
            if quota.try_take(host):
                assert 0 < quota.held <= 8
                quota.give(host)

    threads = [threading.Thread(target=work, args=(host,)) for host in HOSTS for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert quota.held == 0


# --- how often


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def allowed(rates: Rates, host: str, calls: int) -> int:
    """How many of so many calls may begin."""
    begun = 0
    for _ in range(calls):
        try:
            rates.count(host)
        except ResourceExhausted:
            continue
        begun += 1
    return begun


def test_a_host_begins_calls_at_its_rate_and_saves_no_more_than_a_burst() -> None:
    clock = Clock()
    rates = Rates(10.0, 30.0, clock)
    assert allowed(rates, "a", 100) == 30
    assert allowed(rates, "b", 100) == 30  # what others do does not matter
    clock.now += 0.5
    assert allowed(rates, "a", 100) == 5
    clock.now += 3600.0
    assert allowed(rates, "a", 100) == 30


def test_a_host_that_comes_back_when_it_was_told_is_let_in() -> None:
    clock = Clock()
    rates = Rates(2.0, 1.0, clock)
    rates.count("a")
    with pytest.raises(ResourceExhausted, match="a begins more than 2 calls a second") as refused:
        rates.count("a")
    assert refused.value.retry_after == pytest.approx(0.5)
    clock.now += refused.value.retry_after or 0.0
    rates.count("a")


@given(steps=st.lists(st.floats(0.0, 2.0), max_size=200))
def test_no_pattern_of_calls_gets_more_than_the_rate(steps: list[float]) -> None:
    clock = Clock()
    rates = Rates(3.0, 5.0, clock)
    begun = 0
    for seconds in steps:
        clock.now += seconds
        begun += allowed(rates, "a", 1)
    assert begun <= 5.0 + 3.0 * sum(steps) + 1e-6


def test_memory_of_hosts_is_bounded() -> None:
    rates = Rates(1.0, 1.0, Clock(), most_hosts=3)
    assert [allowed(rates, host, 1) for host in ("a", "b", "c", "a", "d")] == [1, 1, 1, 0, 1]
    assert allowed(rates, "a", 1) == 0  # still known: it has called later than b, which is forgotten
    assert allowed(rates, "b", 1) == 1


# --- whose turn


class Model:
    """Turns, as slowly as can be: the least recently served host, of it the least recently served connection."""

    def __init__(self) -> None:
        self.waiting = list[tuple[Peer, int]]()
        self.hosts = list[str]()
        self.connections = list[Peer]()

    def add(self, peer: Peer, item: int) -> None:
        if peer.host not in self.hosts:
            self.hosts.append(peer.host)
        if peer not in self.connections:
            self.connections.append(peer)
        self.waiting.append((peer, item))

    def discard(self, peer: Peer, item: int) -> bool:
        if (peer, item) not in self.waiting:
            return False
        self.waiting.remove((peer, item))
        self._forget()
        return True

    def order(self) -> list[tuple[Peer, int]]:
        firsts = [
            (peer, next(item for each, item in self.waiting if each == peer)) for peer in self.connections
        ]
        return sorted(firsts, key=lambda found: self.hosts.index(found[0].host))

    def take_of(self, peer: Peer) -> int:
        item = next(item for each, item in self.waiting if each == peer)
        self.waiting.remove((peer, item))
        self.hosts.remove(peer.host)
        self.hosts.append(peer.host)
        self.connections.remove(peer)
        self.connections.append(peer)
        self._forget()
        return item

    def _forget(self) -> None:
        there = [peer for peer, _ in self.waiting]
        self.connections = [peer for peer in self.connections if peer in there]
        self.hosts = [host for host in self.hosts if any(peer.host == host for peer in there)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(PEERS), st.integers(0, 9)),
            st.tuples(st.just("take"), st.sampled_from(PEERS), st.just(0)),
            st.tuples(st.just("take_of"), st.sampled_from(PEERS), st.just(0)),
            st.tuples(st.just("discard"), st.sampled_from(PEERS), st.integers(0, 9)),
        ),
        max_size=60,
    )
)
def test_turns_go_round_hosts_and_on_each_round_its_connections(steps: list[tuple[str, Peer, int]]) -> None:
    turns, model = Turns[int](), Model()
    for what, peer, item in steps:
        there = any(each == peer for each, _ in model.waiting)
        if what == "add":
            turns.add(peer, item)
            model.add(peer, item)
        elif what == "discard":
            assert turns.discard(peer, item) == model.discard(peer, item)
        elif what == "take_of" and there:
            assert turns.take_of(peer) == model.take_of(peer)
        elif what == "take" and model.waiting:
            assert turns.take() == model.take_of(model.order()[0][0])
        assert list(turns) == model.order()
        assert len(turns) == len(model.waiting)


def test_who_asks_for_much_waits_behind_his_own() -> None:
    turns = Turns[str]()
    for i in range(100):
        turns.add(Peer("busy", str(i % 2)), f"busy {i}")
    turns.add(Peer("quiet", "0"), "quiet")
    assert [turns.take() for _ in range(4)] == ["busy 0", "quiet", "busy 1", "busy 2"]


def test_nothing_is_to_be_had_of_nobody() -> None:
    with pytest.raises(IndexError, match="nobody waits"):
        Turns[int]().take()
    with pytest.raises(KeyError):
        Turns[int]().take_of(PEERS[0])
    assert not Turns[int]().discard(PEERS[0], 1)
