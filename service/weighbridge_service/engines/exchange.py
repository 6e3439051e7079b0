"""Exchange of engines between replicas, so that each replica lists all engines and keeps the versions that they serve.

A replica forwards the reports that it has received from agents to every other replica in the directory: changes at
once, and all of them at the interval at which agents report. Reports are never withdrawn: an engine that is no longer
forwarded becomes stale, and is finally forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from weighbridge._core.engines.facts import EngineFacts
from weighbridge._transport import wire
from weighbridge.errors import WeighbridgeError
from weighbridge.v1 import engine_service_pb2
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.engines.entries import EngineEntry
from weighbridge_service.engines.known_engines import KnownEngines
from weighbridge_service.plan.declarations import Home
from weighbridge_service.replicas.links import Links

log = logging.getLogger(__name__)

_AT_ONCE = 128
"""Maximum number of engines in one call: at most half a megabyte."""
_LEAST_SECONDS = 0.1
"""Minimum interval between two rounds."""
_CALLS_AT_ONCE = 4


@dataclass(eq=False, slots=True)
class _ExchangePeer:
    """State of the exchange with one other replica.

    Attributes:
        facts: facts of each engine as last sent.
        all_s: time in seconds at which all engines were last sent; None if the next round must send all.
        busy: whether a call to it is under way.
    """

    facts: dict[tuple[str, str], EngineFacts] = field(default_factory=dict)
    all_s: float | None = None
    busy: bool = False


def due(
    entries: Iterable[EngineEntry], told: Mapping[tuple[str, str], EngineFacts], *, everything: bool
) -> list[EngineEntry]:
    """The engines to send to another replica: all engines that have reported to this replica, or only those that have
    changed since they were sent.
    """
    return [each for each in entries if each.here and (everything or told.get(each.key) != each.facts)]


class EngineExchange:
    """Sends the engines that report to this replica to all others. Thread-safe.

    Args:
        links: connections to other replicas.
        others: returns the other replicas.
        engines: engines of this process.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        links: Links,
        others: Callable[[], Sequence[Home]],
        engines: KnownEngines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = links
        self._others = others
        self._engines = engines
        self._clock = clock
        self._peers: dict[Home, _ExchangePeer] = {}
        self._news = threading.Event()
        self._closing = threading.Event()
        self._stack = ExitStack()
        self._stack.enter_context(engines.changes.listening(lambda _name: self._news.set()))
        self._pool = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="engines")
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the exchange."""
        self._stack.close()
        self._closing.set()
        self._news.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while not self._closing.wait(_LEAST_SECONDS):
            self._news.wait(self._engines.report_seconds)
            self._news.clear()
            try:
                self._tell_all()
            except Exception:  # the thread must survive for the next round
                log.exception("engines could not be sent to other replicas")

    def _tell_all(self) -> None:
        others = self._others()
        for gone in self._peers.keys() - set(others):
            del self._peers[gone]
        with suppress(RuntimeError):  # closed
            for home in others:
                peer = self._peers.setdefault(home, _ExchangePeer())
                if not peer.busy:
                    peer.busy = True
                    self._pool.submit(self._tell, home, peer)

    def _tell(self, home: Home, peer: _ExchangePeer) -> None:
        try:
            now_s = self._clock()
            everything = peer.all_s is None or now_s - peer.all_s >= self._engines.report_seconds
            found = due(self._engines.registry.all(), peer.facts, everything=everything)
            for begin in range(0, len(found), _AT_ONCE):
                part = found[begin : begin + _AT_ONCE]
                self._links.exchange(home, (), [_told(each, self._clock()) for each in part])
                peer.facts |= {each.key: each.facts for each in part}
            if everything:
                peer.all_s = now_s
                peer.facts = {each.key: each.facts for each in found}
        except WeighbridgeError as error:
            log.info("engines were not sent to the replica %s: %s", home, error.message)
            peer.all_s = None
        except Exception:
            log.exception("engines could not be sent to the replica %s", home)
        finally:
            peer.busy = False


def _told(entry: EngineEntry, now_s: float) -> pb.ReportedEngine:
    """The message with a report that this replica has received."""
    owner, age_s = entry.owner, max(now_s - entry.heard_s, 0.0)
    return pb.ReportedEngine(
        report=wire.write(engine_service_pb2.EngineReport, entry.report),
        identity=owner.identity,
        host=owner.host,
        age_seconds=age_s,
    )
