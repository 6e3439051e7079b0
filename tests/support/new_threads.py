"""Threads that have begun since a moment: those of earlier tests, which may end at any time, are not among them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NewThreads:
    """Threads of this process that were not there when this was made.

    Example:
        >>> since = NewThreads()
        >>> begin_a_pull()
        >>> assert since.named("receive")
    """

    there: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))

    def alive(self) -> list[threading.Thread]:
        """The new ones that have not ended."""
        return [thread for thread in threading.enumerate() if thread not in self.there]

    def named(self, prefix: str) -> list[str]:
        """The names of those among them that begin so."""
        return [thread.name for thread in self.alive() if thread.name.startswith(prefix)]
