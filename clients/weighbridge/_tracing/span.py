"""Span: what is told of one thing that a process does. Values and ports; nothing here knows OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]
Headers = tuple[tuple[str, str], ...]
NO_ATTRIBUTES: Attributes = {}


class Span:
    """A span; this one is of a process where tracing is off, and does nothing.

    Attributes:
        traceparent: by which other processes continue it; empty if it is not recorded.
    """

    traceparent: str = ""

    @property
    def headers(self) -> Headers:
        """Metadata of calls that belong to it."""
        return ()

    def set(self, name: str, value: str | float | bool) -> None:
        """Say something of it."""

    def fail(self, error: BaseException) -> None:
        """It has failed. Of the error its kind is kept, and not its text, which may have been made of anything."""

    def end(self) -> None:
        """It is over. Has to be called, once; what comes later is ignored."""

    def running(self) -> AbstractContextManager[Span]:
        """It lasts for as long as the block runs, and what the block calls belongs to it, where that runs in one thread or task."""
        return nullcontext(self)

    def under(self, traceparent: str) -> Span:
        """The span under another process's, of whose trace it is learned only now: if this one has begun a trace of its own, it takes that one's
        place from its beginning on, and this one never was."""
        return self

    def begin(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, back: bool = False) -> Span:
        """A span in it.

        Args:
            name: of few kinds.
            attributes: what is said of it.
            back: whether it begins when this one did.
        """
        return self

    def child(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> AbstractContextManager[Span]:
        """A span in it, for as long as the block runs. See `running`."""
        return self.begin(name, attributes).running()


class Tracing(Protocol):
    """What makes spans where tracing is on."""

    def begin(
        self, name: str, attributes: Attributes, origin: str, *, under: bool = False, server: bool = False
    ) -> Span:
        """A span that begins now.

        Args:
            name: of few kinds.
            attributes: what is said of it.
            origin: the traceparent of what led to it; may be empty.
            under: whether it is under that one whatever this thread is at.
            server: whether it is the answer to a call.
        """

    def headers(self) -> Headers:
        """Metadata of calls that belong to what this thread or task is at."""
