"""Audit log: who did what to which model, from where, and how it ended. One line of JSON each, without secrets.

Every refusal is in it, and every call that changes something or reads weights. What could not be written down is refused before it is done.
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
"""Verbs of which refusals alone are recorded."""
_LONGEST = 200
"""Characters of what a caller says: a refused request may be long, and fills no disk."""
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
"""How results begin of which nobody can say whether anything was done."""
_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MOST_UNWRITTEN = 1 << 20
"""Bytes of lines that wait until the file can be written again: of calls that were under way, and of refusals."""


@contextmanager
def noting(into: dict[str, Any]) -> Iterator[None]:
    """What the block, in this thread or in those that it calls with its context, notes of the change that it makes goes to ``into``."""
    token = _noted.set(into)
    try:
        yield
    finally:
        _noted.reset(token)


def note(**said: object) -> None:
    """Note something of the change that the present call asks for, or has made, for its line in the audit log.

    Args:
        said: ``version``, as it was asked for, and its number once that is known; ``before`` and ``after``: the value that was changed, as JSON has it;
            ``state``: what has become of it, as ``done`` or ``pending``.
    """
    into = _noted.get()
    if into is not None:
        into |= said


class _AuditFile:
    """A file to which lines are appended, made for the service's user and group alone: it says who uses what. One that was moved away is begun
    anew, and what could not be written is written first. Not thread-safe.

    Args:
        path: where it is.

    Raises:
        OSError: it cannot be written; also from `flush`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unwritten = bytearray()
        self.flush()

    def add(self, line: bytes) -> bool:
        """Have a line written by the next `flush`; whether there is room for it."""
        if len(self._unwritten) + len(line) > _MOST_UNWRITTEN:
            return False
        self._unwritten += line
        return True

    def flush(self) -> None:
        """Write what is not written yet; with nothing to write, open the file where that is to be done."""
        if self._descriptor is not None and not self._is_there(self._descriptor):
            self.close()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o640)
        while self._unwritten:
            written = os.write(self._descriptor, self._unwritten)
            del self._unwritten[:written]

    def close(self) -> None:
        """Close it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


def _of_change(noted: Mapping[str, Any], result: str) -> dict[str, Any]:
    """The fields of a change; none of a call that makes none."""
    found = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in noted.items()}
    if found and result != "OK" and "state" not in found:
        found["state"] = "failed" if result.startswith(_UNCERTAIN) else "refused"
    return found


class Audit:
    """The audit log of one service. Thread-safe; a file that was moved away is begun anew.

    Args:
        path: the file, to which is appended; None records nothing.

    Raises:
        InvalidArgument: it cannot be written.
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
        """Raise Unavailable if what is asked for is to be written down, and cannot be. Before anything of it is done."""
        if self._file is None or verb in _QUIET:
            return
        with self._lock:
            error = self._flush(self._file)
        if error is not None:
            raise Unavailable(
                f"the service's audit log cannot be written: {error.strerror}",
                fix="try again once whoever runs the service has mended it: its folder, its rights, or room on its disk",
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
        """Write down how a call has ended, if it is of a kind that is recorded.

        Args:
            face: by which it came: ``grpc``, ``http`` or ``lane``.
            host: from where.
            identity: of whom; empty if nobody was recognised.
            action: method or route.
            verb: what it asked for.
            model: of which model; empty if of none or all.
            ref: of which ref or version; empty if of none.
            result: ``OK``, or the reason of the error.
            noted: what was said to `note` of a change.
            heartbeat: whether it comes every few seconds, and only a refusal says something.
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
        """The error by which the file cannot be written; None if it can. The lock is held."""
        try:
            file.flush()
        except OSError as error:
            if not self._failing:
                log.error(
                    "the audit log %s cannot be written: %s; calls that belong into it are refused",
                    self._path,
                    error.strerror,
                )
            self._failing = True
            return error
        if self._failing:
            log.warning(
                "the audit log %s can be written again; refusals that it lacks: %d", self._path, self._lost
            )
        self._failing, self._lost = False, 0
        return None
