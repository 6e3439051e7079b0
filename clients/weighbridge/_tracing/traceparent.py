"""Trace parent: the W3C header that says which span a call belongs to. Source: Trace Context, https://www.w3.org/TR/trace-context/, section 3.2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEADER = "traceparent"
"""Key in a call's metadata."""
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span in another process.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
    """

    trace_id: int
    span_id: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @staticmethod
    def parse(text: str) -> TraceParent | None:
        """The span that a header names; None if it is malformed, or the span is not recorded: nothing continues either."""
        found = _FORM.fullmatch(text)
        if found is None or not int(found[3], 16) & _SAMPLED:
            return None
        trace_id, span_id = int(found[1], 16), int(found[2], 16)
        return TraceParent(trace_id, span_id) if trace_id and span_id else None


def canonical(text: str) -> str:
    """A header as it is kept; empty if it is malformed, or names a span that is not recorded."""
    found = TraceParent.parse(text)
    return "" if found is None else str(found)


def in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The header among a call's metadata, as it is kept; empty if there is none, or several."""
    shown = [value for key, value in metadata or () if key == HEADER]
    return canonical(shown[0]) if len(shown) == 1 and isinstance(shown[0], str) else ""
