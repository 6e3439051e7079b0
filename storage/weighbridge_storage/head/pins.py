"""Pins of a model's versions by adapters: those that are on a version keep it. Pure.

A version of an adapter names its base from its opening on, in the adapter's head; the pin is in the base's head. No write changes both, so
the order of writes has to do:

1. The version is opened: the adapter's head names its number and its base.
2. The base is pinned for that number (`pin`), unless it is pinned for a higher one already. Nothing is received before.
3. It is received and published, or given up.

A pin is removed (`unpin`) by what one reading of the adapter's head says: that no version is on the base any more, and which number is the next one. A
pin for a number below that was asked by a version which that reading has seen ended. One for that number or a higher one stays. Both are
changes of the base's head, which compare and swap: a version whose pin was removed before step 2 pins again there, and one that
was pinned after the reading has a higher number. So no version is published whose base has no pin, unless the base was deleted by force.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from weighbridge._core.metadata import BaseVersion, Metadata
from weighbridge._core.text.counts import counted, named
from weighbridge.errors import NotFound, ResourceExhausted
from weighbridge_storage.documents.entries import PinEntry
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History

_NAMED = 5
"""Adapters that an error names."""


def pin(history: History, asked: PinEntry, most: int) -> Head:
    """Keep a version for an adapter.

    Args:
        history: of the base.
        asked: the pin. One that is there for a version of the adapter as new, or newer, changes nothing.
        most: pins that the identity ``asked.by`` may have in this head.

    Raises:
        NotFound: the version is not part of history: it was never, or was deleted.
        ResourceExhausted: the identity has as many pins as it may.
    """
    head = history.head
    others = tuple(each for each in head.pins if _place(each) != _place(asked))
    there = next((each for each in head.pins if _place(each) == _place(asked)), None)
    if there is not None and there.newest >= asked.newest:
        return head
    if history.durable(asked.version) is None:
        raise NotFound(
            f"version {asked.version} is not there, on which {asked.adapter} is to be",
            fix="push on another base",
        )
    if there is None and sum(each.by == asked.by for each in others) >= most:
        raise ResourceExhausted(
            f"{asked.by or 'those without a name'} may have adapters on {counted(most, 'version')} of this model, each adapter counted apart",
            fix="delete adapters that are not needed any more, and collect the base; or let the service's policy give more `adapters`",
        )
    now = asked if there is None else replace(there, newest=asked.newest)
    return replace(head, pins=tuple(sorted((*others, now), key=_place)))


def unpin(head: Head, number: int, adapter: str, below: int) -> Head:
    """Keep a version for an adapter no more, unless it is pinned for a version of the adapter that was not seen.

    Args:
        head: of the base.
        number: of its version.
        adapter: ``namespace/name`` of the adapter, of which no version was on it when its head was read.
        below: the number that the adapter's next version was to get then.
    """
    gone = [each for each in head.pins if _place(each) == (number, adapter) and each.newest < below]
    return replace(head, pins=tuple(each for each in head.pins if each not in gone)) if gone else head


def pinned_by(head: Head, number: int) -> tuple[str, ...]:
    """The adapters that are on a version."""
    return tuple(each.adapter for each in head.pins if each.version == number)


def sees_all(_adapter: str) -> bool:
    """True of each adapter: where there is no policy, or no caller."""
    return True


def adapters_text(adapters: Collection[str], sees: Callable[[str], bool]) -> str:
    """Adapters in an error: the names of some of those that the caller ``sees``, and how many others there are."""
    known = [each for each in adapters if sees(each)]
    hidden = len(adapters) - len(known)
    others = [counted(hidden, "adapter") + " that you may not look at"] if hidden else []
    return " and ".join([*([named(known, _NAMED)] if known else []), *others])


def is_on(adapter: History, base: str, number: int) -> bool:
    """Whether a version of an adapter is on a version of a model: one that is being received, is part of history, or was and can be read."""

    def on(metadata: Metadata) -> bool:
        found = BaseVersion.of(metadata)
        return found is not None and (found.model, found.number) == (base, number)

    stored = (*adapter.versions().values(), *adapter.retired().values())
    return any(on(each.metadata) for each in adapter.head.open.values()) or any(
        on(each.metadata) for each in stored
    )


def _place(entry: PinEntry) -> tuple[int, str]:
    return entry.version, entry.adapter
