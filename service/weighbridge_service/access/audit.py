"""Audit log: identity, host, action, model and result of calls, one line of JSON each, without secrets.

It records every refusal, and every call that changes something or reads weights. While the log cannot be written, the
service refuses such calls before it executes them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable

log = logging.getLogger(__name__)

_QUIET = frozenset({Verb.PROBE, Verb.LOOK, Verb.OBSERVE, Verb.REPLICATE})
"""Verbs of which only refusals are recorded."""
_LONGEST = 200
"""Limit of characters of a text from a caller, so that long refused requests do not fill the disk."""
_REFUSALS = frozenset({Unauthenticated.reason, PermissionDenied.reason})
_UNCERTAIN = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
    "DATA_LOSS",
    "ABORTED",
    "HTTP 5",
)
"""Prefixes of results that leave open whether the call changed anything."""
_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MOST_UNWRITTEN = 1 << 20
"""Limit of bytes of lines, of calls under way and of refusals, that are buffered while the file cannot be written."""


@contextmanager
def noting(into: dict[str, Any]) -> Iterator[None]:
    """Collect in ``into`` what the block passes to `note`, in this thread or in threads that run with a copy of its
    context.
    """
    token = _noted.set(into)
    try:
        yield
    finally:
        _noted.reset(token)


def note(**said: object) -> None:
    """Add fields about the change that the current call asks for, or has made, to its line in the audit log.

    Args:
        said: ``version``: as requested, and its number once that is known; ``before`` and ``after``: the value that was
            changed, as a JSON value; ``state``: the outcome, such as ``done`` or ``pending``.
    """
    into = _noted.get()
    if into is not None:
        into |= said


class _AuditFile:
    """A file to which lines are appended. Not thread-safe.

    Only the service's user and group may read it, because it reveals who uses which models. If the file was moved away,
    a new one is created; lines that could not be written are then written first.

    Raises:
        OSError: it cannot be written; also from `flush`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unwritten = bytearray()
        self.flush()

    def add(self, line: bytes) -> bool:
        """Buffer a line for the next `flush`. Returns False if the buffer has no capacity for it."""
        if len(self._unwritten) + len(line) > _MOST_UNWRITTEN:
            return False
        self._unwritten += line
        return True

    def flush(self) -> None:
        """Write the buffered lines.

        Opens the file first if it is not open or was moved away, also with nothing to write.
        """
        if self._descriptor is not None and not self._is_there(self._descriptor):
            self.close()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o640)
        while self._unwritten:
            written = os.write(self._descriptor, self._unwritten)
            del self._unwritten[:written]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


def _of_change(noted: Mapping[str, Any], result: str) -> dict[str, Any]:
    """The fields of a change; empty for a call that changes nothing."""
    found = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in noted.items()}
    if found and result != "OK" and "state" not in found:
        found["state"] = "failed" if result.startswith(_UNCERTAIN) else "refused"
    return found


class Audit:
    """The audit log of one service. Thread-safe. If the file was moved away, a new one is created.

    Args:
        path: the file to append to; with None nothing is recorded.

    Raises:
        InvalidArgument: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._failing, self._lost = False, 0
        self._file: _AuditFile | None = None
        if path is None:
            return
        try:
            self._file = _AuditFile(path)
        except OSError as error:
            raise InvalidArgument(
                f"the audit log {path} cannot be written: {error.strerror}",
                fix="name a file in a folder that the service's user may write to",
            ) from error

    def check(self, verb: Verb) -> None:
        """Raise Unavailable if calls with this verb are recorded and the log cannot be written.

        Call this before executing the call.
        """
        if self._file is None or verb in _QUIET:
            return
        with self._lock:
            error = self._flush(self._file)
        if error is not None:
            raise Unavailable(
                f"the service's audit log cannot be written: {error.strerror}",
                fix=(
                    "try again once the service's operator has repaired it: its folder, its "
                    "permissions, or space on its disk"
                ),
            )

    def record(
        self,
        *,
        face: str,
        host: str,
        identity: str,
        action: str,
        verb: Verb,
        model: str,
        ref: str,
        result: str,
        noted: Mapping[str, Any] = _NOTHING,
        heartbeat: bool = False,
    ) -> None:
        """Record the result of a call, if calls of its kind are recorded.

        Args:
            face: protocol of the call: ``grpc``, ``http`` or ``lane``.
            host: host of the caller.
            identity: name of the caller's identity; empty if the caller was not recognised.
            action: method or route.
            verb: verb that the call needs.
            model: name of the model; empty for none or all.
            ref: ref or version; empty for none.
            result: ``OK``, or the reason of the error.
            noted: fields that were passed to `note`.
            heartbeat: whether the call repeats every few seconds, so that only a refusal is recorded.
        """
        quiet = heartbeat or verb in _QUIET
        if self._file is None or (quiet and result not in _REFUSALS):
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "identity": identity,
            "host": host,
            "face": face,
            "action": action,
            "verb": verb.value,
            "model": model[:_LONGEST],
            "ref": ref[:_LONGEST],
            "result": result,
            **_of_change(noted, result),
        }
        text = json.dumps(line) + "\n"
        with self._lock:
            if not self._file.add(text.encode()):
                self._lost += 1
            self._flush(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _flush(self, file: _AuditFile) -> OSError | None:
        """Flush the file; the error if it cannot be written, else None. The caller holds the lock."""
        try:
            file.flush()
        except OSError as error:
            if not self._failing:
                log.error(
                    "the audit log %s cannot be written: %s; calls that it must record are refused",
                    self._path,
                    error.strerror,
                )
            self._failing = True
            return error
        if self._failing:
            log.warning(
                "the audit log %s can be written again; refusals that are missing from it: %d",
                self._path,
                self._lost,
            )
        self._failing, self._lost = False, 0
        return None
