"""Heartbeat of replicas that receive versions together: they exchange progress, and detect lost replicas.

Each process has one heartbeat. It calls each replica with which it shares a version once a second, and immediately
after a change in this process. The push sessions (`SharedPushes`) supply and receive the progress. The heartbeat does
not use the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from weighbridge.errors import VersionFailed, WeighbridgeError
from weighbridge_service.plan.declarations import Home
from weighbridge_service.replicas.links import Links, refuses
from weighbridge_service.replicas.liveness import Liveness, SilenceLimits
from weighbridge_service.replicas.progress import Progress, SharedPush

log = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0
_REFUSED_SECONDS = 2.0
_CALLS_AT_ONCE = 4


class SharedPushes(Protocol):
    """The versions that a process receives together with other replicas. Thread-safe."""

    def shared(self) -> Sequence[SharedPush]:
        """Shared pushes that, to this process's knowledge, have not ended."""

    def progress(self, model: str, number: int, claim: str) -> Sequence[Progress]:
        """Progress or outcome of this replica's parts of a version; empty if it has no parts under this claim."""

    def heard(self, sender: Home, progress: Progress) -> None:
        """Record the progress of another replica. Known progress and progress under another agreement are ignored."""

    def lost(self, replica: Home, error: VersionFailed) -> None:
        """Record that another replica is lost, with everything that it has not written to the store."""


_Key = tuple[str, int, str, int]


@dataclass(eq=False, slots=True)
class _Peer:
    """State of the exchange with one other replica.

    Attributes:
        health: liveness of the replica.
        busy: whether a thread is calling it; that thread owns the fields other than `busy` and `again`.
        again: whether to call it once more after the current call.
        shared: parts of versions whose progress was sent but whose outcome was not sent yet.
        delivered: parts whose written files were sent.
    """

    health: Liveness
    busy: bool = False
    again: bool = False
    shared: set[_Key] = field(default_factory=set)
    delivered: set[_Key] = field(default_factory=set)


class Heartbeat:
    """Exchanges progress with other replicas. Thread-safe.

    Args:
        links: connections to other replicas.
        pushes: source of this replica's progress, and receiver of the others'.
        news: the process sets it when a change must be sent at once.
        silent_s: seconds without a response after which a replica is lost. If its process has ended, the loss is
            detected sooner.
        clock: returns seconds of a monotonic clock.
        beat_s: seconds between two exchanges without news.
    """

    def __init__(
        self,
        links: Links,
        pushes: SharedPushes,
        news: threading.Event,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = _HEARTBEAT_SECONDS,
    ) -> None:
        self._links = links
        self._pushes = pushes
        self._news = news
        self._limits = SilenceLimits(min(_REFUSED_SECONDS, silent_s), silent_s)
        self._clock = clock
        self._beat_s = beat_s
        self._lock = threading.Lock()
        self._peers: dict[Home, _Peer] = {}
        self._closing = False
        self._pool = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="replicas")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closing = True
        self._news.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while not self._closing:
            self._news.wait(self._beat_s)
            self._news.clear()
            try:
                self._call_all()
            except Exception:  # the thread must survive for the next beat
                log.exception("progress could not be sent to other replicas")

    def _call_all(self) -> None:
        wanted = {peer for push in self._pushes.shared() for peer in push.peers}
        due = []
        with self._lock:
            for home in wanted - self._peers.keys():
                self._peers[home] = _Peer(Liveness(self._clock()))
            for home, peer in list(self._peers.items()):
                if peer.busy:
                    peer.again = True
                elif home in wanted or peer.shared:
                    peer.busy = True
                    due.append((home, peer))
                else:
                    del self._peers[home]
        with suppress(RuntimeError):  # closed
            for home, peer in due:
                self._pool.submit(self._call, home, peer)

    def _call(self, home: Home, peer: _Peer) -> None:
        """Call one replica, and repeat the call as long as `again` is set during it."""
        while True:
            try:
                self._call_once(home, peer)
            except Exception:
                log.exception("exchanging progress with the replica %s failed", home)
            with self._lock:
                if not peer.again or self._closing:
                    peer.busy = False
                    return
                peer.again = False

    def _call_once(self, home: Home, peer: _Peer) -> None:
        shared = {push.progress.key: push.progress for push in self._pushes.shared() if home in push.peers}
        over = peer.shared - shared.keys()
        ended = [
            each
            for version in {key[:3] for key in over}
            for each in self._pushes.progress(*version)
            if each.key in over
        ]
        peer.shared |= shared.keys()
        told = [*shared.values(), *ended]
        if not told:
            peer.shared.clear()
            return
        news = [(each, each.written is not None and each.key not in peer.delivered) for each in told]
        try:
            answered, heard = self._links.exchange(home, news)
        except WeighbridgeError as error:
            self._not_answered(home, peer, error)
            return
        peer.health = peer.health.answered(self._clock())
        peer.shared = set(shared)
        if answered != home:
            self._pushes.lost(home, _gone(home, "it was restarted"))
            return
        peer.delivered = {each.key for each in told if each.written is not None}
        for progress in heard:
            self._pushes.heard(home, progress)

    def _not_answered(self, home: Home, peer: _Peer, error: WeighbridgeError) -> None:
        log.info("the replica %s does not answer: %s", home, error.message)
        now_s = self._clock()
        peer.health = peer.health.failed(now_s, refused=refuses(home.address))
        if peer.health.is_lost(now_s, self._limits):
            peer.shared.clear()
            self._pushes.lost(home, _gone(home, "it cannot be reached any more"))


def _gone(home: Home, why: str) -> VersionFailed:
    return VersionFailed(
        f"the replica {home} has lost what it had received: {why}",
        fix="see why that replica has ended, then push the step again",
    )
