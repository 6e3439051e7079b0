"""Audit log: who did what to which model, from where, and how it ended. One line of JSON each, without secrets.

Every refusal is in it, and every call that changes something or reads weights.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from weighbridge.errors import InvalidArgument, PermissionDenied, Unauthenticated
from weighbridge_service.access.scopes import Verb

_QUIET = frozenset({Verb.PROBE, Verb.LOOK, Verb.OBSERVE, Verb.REPLICATE})
"""Verbs of which refusals alone are recorded."""
_LONGEST = 200
"""Characters of what a caller says: a refused request may be long, and fills no disk."""
_REFUSALS = frozenset({Unauthenticated.reason, PermissionDenied.reason})


class _AuditFile(WatchedFileHandler):
    """A file that is made for the service's user and group alone: it says who uses what."""

    def _open(self) -> TextIOWrapper:
        return open(  # the handler closes it
            self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o640)
        )


class Audit:
    """The audit log of one service. Thread-safe; a file that was moved away is begun anew.

    Args:
        path: the file, to which is appended; None records nothing.

    Raises:
        InvalidArgument: it cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._handler: WatchedFileHandler | None = None
        if path is None:
            return
        try:
            self._handler = _AuditFile(path, encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(
                f"the audit log {path} cannot be written: {error.strerror}",
                fix="name a file in a folder that the service's user may write to",
            ) from error

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
        """
        if self._handler is None or (verb in _QUIET and result not in _REFUSALS):
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
        }
        # a text as an argument would be formatted
        self._handler.handle(logging.LogRecord("audit", logging.INFO, "", 0, json.dumps(line), None, None))

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()
