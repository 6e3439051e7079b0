"""Validation of engines' reports before they are recorded and shown. All functions are pure."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from weighbridge._core.engines.facts import ENGINE_STATES, EngineReport
from weighbridge._core.engines.step_parts import OF_AGENT, chosen
from weighbridge._core.text.plain import plain
from weighbridge._core.text.shortening import shortened, shown
from weighbridge.errors import InvalidArgument
from weighbridge_storage.documents.names import REF_PATTERN, ModelName

_MOST = 2**53
_LONGEST_ERROR = 1000
_LONGEST_S = 10 * 365 * 86_400.0
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KIND = re.compile(r"[a-z0-9_.-]{0,32}")
_TEXT = re.compile(r"[!-~]{0,255}")
"""Addresses, host names and other strings without spaces and control characters."""
_REF = re.compile(rf"(?:{REF_PATTERN})?")
_TRACEPARENT = re.compile(r"(?:[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?")
_PROOF = re.compile(r"[a-z ]{0,32}")
_PATTERNS = {
    "engine_id": (_ID, "1 to 64 letters, digits, '-', '_' or '.'"),
    "kind": (_KIND, "at most 32 small letters, digits, '-', '_' or '.'"),
    "address": (_TEXT, "at most 255 characters of ASCII without spaces"),
    "host": (_TEXT, "at most 255 characters of ASCII without spaces"),
    "ref": (_REF, "the name of a ref"),
    "update_lane": (_KIND, "at most 32 small letters, digits, '-', '_' or '.'"),
    "drafter": (_TEXT, "at most 255 characters of ASCII without spaces"),
    "proof": (_PROOF, "at most 32 small letters and spaces"),
    "golden": (_PROOF, "at most 32 small letters and spaces"),
    "traceparent": (_TRACEPARENT, "the form that W3C Trace Context defines"),
}
_COUNTS = (
    "version",
    "target",
    "pid",
    "beat",
    "update_version",
    "update_bytes",
    "proved_version",
    "proofs",
    "failed_proofs",
    "golden_version",
)
_DRIFTS = ("golden_drift", "golden_mean_drift")
_SECONDS = (
    *("state_seconds", "update_age_seconds", "update_prepare_seconds", "update_pause_seconds"),
    *("proof_seconds", "proof_age_seconds"),
)


def checked_report(report: EngineReport) -> EngineReport:
    """Validate a report. Returns it with error messages shortened to plain text.

    Parts of a step that this release does not know, from an agent of a later release, are dropped.

    Raises:
        InvalidArgument: a field is invalid. The error names it.
    """
    ModelName.parse(report.model)
    for field, (pattern, what) in _PATTERNS.items():
        value = getattr(report, field)
        if not pattern.fullmatch(value) or value.endswith("\n"):
            raise InvalidArgument(f"{shown(value)} of a report is not a valid {field}", fix=f"use {what}")
    if report.state not in ENGINE_STATES:
        raise InvalidArgument(
            f"{shown(report.state)} of a report is not a state", fix=f"use one of {', '.join(ENGINE_STATES)}"
        )
    for field in _COUNTS:
        if not 0 <= getattr(report, field) <= _MOST:
            raise InvalidArgument(f"{field} of a report is not from 0 to {_MOST}")
    for field in _SECONDS:
        if not (math.isfinite(getattr(report, field)) and 0.0 <= getattr(report, field) <= _LONGEST_S):
            raise InvalidArgument(f"{field} of a report is not a duration")
    for field in _DRIFTS:
        if not (math.isfinite(getattr(report, field)) and getattr(report, field) >= 0.0):
            raise InvalidArgument(f"{field} of a report is not a difference of log probabilities")
    parts = chosen(report.update_parts, OF_AGENT)
    if not all(math.isfinite(each) and abs(each) <= _LONGEST_S for each in parts.values()):
        raise InvalidArgument("update_parts of a report are not numbers of seconds")
    return replace(
        report,
        error=_line(report.error),
        proof_error=_line(report.proof_error),
        failed_proofs=min(report.failed_proofs, report.proofs),
        update_parts=parts,
    )


def _line(text: str) -> str:
    """A message as one short line of plain text."""
    return shortened(" ".join(plain(text[: 4 * _LONGEST_ERROR]).split()), _LONGEST_ERROR)
