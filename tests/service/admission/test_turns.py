"""Whose turn is it?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.turns import Turns

PEERS = [Peer(host, connection) for host in ("a", "b", "c") for connection in ("1", "2")]


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
        firsts = [(peer, next(item for each, item in self.waiting if each == peer)) for peer in self.connections]
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
    with pytest.raises(IndexError, match="the queue is empty"):
        Turns[int]().take()
    with pytest.raises(KeyError):
        Turns[int]().take_of(PEERS[0])
    assert not Turns[int]().discard(PEERS[0], 1)
