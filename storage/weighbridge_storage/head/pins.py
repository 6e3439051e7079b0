"""Pins of a model's versions by adapters: those that are on a version keep it. Pure.

A version of an adapter names its base from its opening on, in the adapter's head; the pin is in the base's head. No write changes both, so
the order of reads and writes has to do:

1. The version is opened: the adapter's head names its number and its base.
2. The base's head is read. If it has a pin that no collection doubts, that is the pin; otherwise one is written, without doubt (`pin`). Nothing is received before.
3. It is received and published, or given up.

A collection removes a pin in three steps: it marks it with a doubt of its own (`doubt`), then reads the adapter's head, and, if no version there is on the base,
removes the pin if it still has that mark (`unpin`). A version whose step 2 comes before the mark was opened before the adapter's head was read, which therefore names it; one whose step 2
comes later finds the doubt, or no pin, and writes. Its write takes the mark away, so the pin stays. All are changes of the base's head, which compare and swap. So no version is published
whose base has no pin, unless the base was deleted by force; and a push to a base that is pinned already reads one head, and writes none but its own.
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
        asked: the pin. One that is there and that no collection doubts changes nothing.
        most: pins that the identity ``asked.by`` may have in this head.

    Raises:
        NotFound: the version is not part of history: it was never, or was deleted.
        ResourceExhausted: the identity has as many pins as it may.
    """
    head = history.head
    others = tuple(each for each in head.pins if place(each) != place(asked))
    there = next((each for each in head.pins if place(each) == place(asked)), None)
    if there is not None and not there.doubt:
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
    now = asked if there is None else replace(there, doubt="")
    return replace(head, pins=tuple(sorted((*others, now), key=place)))


def doubt(head: Head, places: Collection[tuple[int, str]], mark: str) -> Head:
    """Mark pins of which it will be looked whether they are still needed.

    Args:
        head: of the base.
        places: number of the base's version and name of the adapter of each.
        mark: of this look alone. It takes the place of another one's, which then removes nothing.
    """
    marked = tuple(replace(each, doubt=mark) if place(each) in places else each for each in head.pins)
    return replace(head, pins=marked)


def unpin(head: Head, places: Collection[tuple[int, str]], mark: str) -> Head:
    """Keep versions for adapters no more that were on none of them when their heads were read after the mark was set. Pins without the mark stay.

    Args:
        head: of the base.
        places: as for `doubt`.
        mark: the mark that was set.
    """
    return replace(
        head, pins=tuple(each for each in head.pins if each.doubt != mark or place(each) not in places)
    )


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


def place(entry: PinEntry) -> tuple[int, str]:
    """The place of a pin: the number of the base's version, and the adapter's name."""
    return entry.version, entry.adapter
