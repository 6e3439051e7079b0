"""Reporter of an engine: reports the engine's served version to the service from a separate thread, for which updates
do not wait.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from urllib.parse import urlsplit

from weighbridge._clients.calls.engine_calls import report_engine
from weighbridge._clients.client import Client
from weighbridge._core.engines.facts import ENGINE_ENDED, EngineFacts, EngineReport
from weighbridge._core.engines.status import AgentStatus
from weighbridge._core.pauses import DICE
from weighbridge._core.text.shortening import shortened
from weighbridge._reporting.said import Contact, ReportedState, status_of
from weighbridge.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable, WeighbridgeError

__all__ = ["EngineReporter"]

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Pause between attempts to reach the service, so that the engine is listed again soon after the service is back."""
_REFUSED_SECONDS = 30.0
"""Pause between reports to a service that refuses them."""
_LAST_SECONDS = 2.0
"""Seconds for which a closing agent waits for its last report."""
_LONGEST_ERROR = 1000
_HERE = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}  # noqa: S104  # no address to listen at


class EngineReporter:
    """Reports an engine's state: at once when it has changed, and every few seconds. Thread-safe.

    A change only acquires a lock. An unreachable service receives the report when it is reachable again. The service
    lists the engine (`Client.engines`), and retains the versions that it serves. Any identity that may pull the model
    may report.

    Args:
        client: client of the service; the reporter makes its own connection with its address and credentials.
        model: ``namespace/name``.
        kind: kind of the engine, such as ``vllm``.
        address: URL of the engine.
        ref: ref that it follows; empty if it follows none.
        version: number of the version that it serves; 0 if none.
        listener: called with the engine's status, in the reporter's thread: before and after each report, and so at
            once.
        delay: seconds before the first report; if the reporter is stopped before, nothing is reported.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        kind: str,
        address: str = "",
        ref: str = "",
        version: int = 0,
        listener: Callable[[AgentStatus], None] = lambda _status: None,
        delay: float = 0.0,
    ) -> None:
        now_s = time.monotonic()
        host = socket.gethostname()
        facts = EngineFacts(
            uuid.uuid4().hex[:16],
            model,
            kind,
            address_from_elsewhere(address, host),
            ref,
            version,
            host=host,
            pid=os.getpid(),
        )
        self._connection = client._connection.another()
        self._listener = listener
        self._delay = delay
        self._lock = threading.Lock()
        self._said = ReportedState(facts, now_s, now_s)
        self._contact = Contact()
        self._beat = 0
        self._refused = ""
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-reports", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        with self._lock:
            facts = self._said.facts
        return f"<EngineReporter of {facts.model}: {facts.state} {facts.version or 'no version'}>"

    def say(self, *, updated_s: float | None = None, **changes: Any) -> None:
        """Record changes of the engine's state, and report them.

        Args:
            updated_s: when the update in the changes ended, by `time.monotonic`; by default now.
            changes: fields of the engine by name: ``version``, ``target``, ``state``, ``error``, and ``update_version``
                with others of an update.
        """
        for text in changes.keys() & {"error", "proof_error"}:
            changes[text] = shortened(changes[text], _LONGEST_ERROR)
        with self._lock:
            self._said = self._said.with_changes(changes, time.monotonic(), updated_s)
        self._wake.set()

    @property
    def status(self) -> AgentStatus:
        """Status of the engine, as far as known here."""
        with self._lock:
            said, contact = self._said, self._contact
        return status_of(said, contact, time.monotonic(), round(time.time() * 1000))

    def stop(self) -> None:
        """Send a last report that the agent ends, then stop. Does not wait."""
        if not self._ending.is_set():
            self.say(state=ENGINE_ENDED, target=0)
            self._ending.set()
            self._wake.set()

    def close(self) -> None:
        """As `stop`, and wait some seconds for the last report."""
        self.stop()
        self._thread.join(_LAST_SECONDS)
        self._connection.close()

    def _run(self) -> None:
        try:
            if not self._ending.wait(self._delay) or not self._delay:
                self._report_until_the_end()
        finally:
            self._connection.close()

    def _report_until_the_end(self) -> None:
        while True:
            self._wake.clear()
            last = self._ending.is_set()
            try:
                self._listener(self.status)
                pause = self._report()
                self._listener(self.status)
            except Exception:  # a failed report must not stop the engine or later reports
                log.exception("the report of the engine's state failed")
                pause = _REFUSED_SECONDS
            if last:
                return
            self._wake.wait(pause * DICE.uniform(0.9, 1.0))

    def _report(self) -> float:
        """Send one report. Returns the seconds until the next one."""
        now_s = time.monotonic()
        self._beat += 1
        with self._lock:
            said = self._said
        report = EngineReport(
            **{field.name: getattr(said.facts, field.name) for field in fields(EngineFacts)},
            beat=self._beat,
            state_seconds=now_s - said.since_s,
            update_age_seconds=now_s - said.updated_s,
            proof_age_seconds=now_s - said.proved_s if said.facts.proof else 0.0,
        )
        try:
            reported = self._connection.run(report_engine(report), retry_seconds=0.0)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
            with self._lock:
                lost_s = now_s if self._contact.lost_s is None else self._contact.lost_s
                self._contact = replace(self._contact, lost_s=lost_s, problem=error.message)
            return _AGAIN_SECONDS
        except WeighbridgeError as error:
            self._note_refusal(error)
            return _REFUSED_SECONDS
        with self._lock:
            self._contact = Contact(reported.engine, time.monotonic(), reported.report_seconds)
        self._refused = ""
        return reported.report_seconds

    def _note_refusal(self, error: WeighbridgeError) -> None:
        """Record and log, once, that the service refuses reports; updates go on."""
        with self._lock:
            self._contact = replace(self._contact, lost_s=None, problem=error.message)
        if error.message != self._refused and not self._ending.is_set():
            if isinstance(error, NotFound):  # an engine may be started before its trainer
                log.warning("the service does not accept reports of this engine yet: %s", error.message)
            else:
                log.warning("the service does not accept reports of this engine: %s", error)
        self._refused = error.message


def address_from_elsewhere(url: str, host: str) -> str:
    """A server's URL for other machines: without credentials, path and query, and with this machine's name in place of
    a local address.
    """
    parts = urlsplit(url)
    try:
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    name = host if name in _HERE else name
    name = f"[{name}]" if ":" in name else name
    return f"{parts.scheme}://{name}{'' if port is None else f':{port}'}" if name else ""
