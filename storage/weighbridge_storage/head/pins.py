"""Pins of a model's versions by adapters: a pin keeps the version that an adapter is based on. All functions are pure.

From its opening on, a version of an adapter names its base in the adapter's head. The pin is in the base's head. A
single write cannot change both heads, so the order of reads and writes ensures consistency:

1. The version is opened: the adapter's head names its number and its base.
2. The base's head is read. If it contains a pin that no collection doubts, that pin is used; otherwise a pin without
   doubt is written
(`pin`). The service does not receive any data of the version before this step.
3. The version is received and published, or fails.

A collection removes a pin in three steps. It marks the pin with its own doubt (`doubt`), then reads the adapter's head.
If no version there is based on the pinned version, it removes the pin if the pin still has that mark (`unpin`). If step
2 of a version precedes the mark, the version was opened before the adapter's head was read, so the head names it. If
step 2 follows the mark, it finds the doubt, or no pin, and writes the pin without the mark, so the pin stays. All of
these are compare-and-swap changes of the base's head. So the base of every published version has a pin, unless the base
was deleted by force. A push to a base that is already pinned reads one additional head, and writes only its own.
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
"""Maximum number of adapters that an error names."""


def pin(history: History, asked: PinEntry, most: int) -> Head:
    """Keep a version for an adapter.

    Args:
        history: history of the base.
        asked: the pin. If it exists and no collection doubts it, nothing changes.
        most: maximum number of pins that the identity ``asked.by`` may have in this head.

    Raises:
        NotFound: the version is not part of history: it was never part of it, or was deleted.
        ResourceExhausted: the identity already has the maximum number of pins.
    """
    head = history.head
    others = tuple(each for each in head.pins if place(each) != place(asked))
    there = next((each for each in head.pins if place(each) == place(asked)), None)
    if there is not None and not there.doubt:
        return head
    if history.durable(asked.version) is None:
        raise NotFound(
            f"version {asked.version}, the base of {asked.adapter}, does not exist",
            fix="push on a different base",
        )
    if there is None and sum(each.by == asked.by for each in others) >= most:
        raise ResourceExhausted(
            (
                f"{asked.by or 'callers without a name'} may have adapters on "
                f"{counted(most, 'version')} of this model; each adapter counts separately"
            ),
            fix=(
                "delete adapters that are not needed any more, and collect the base; or let the "
                "service's policy give more `adapters`"
            ),
        )
    now = asked if there is None else replace(there, doubt="")
    return replace(head, pins=tuple(sorted((*others, now), key=place)))


def doubt(head: Head, places: Collection[tuple[int, str]], mark: str) -> Head:
    """Mark pins that a collection is about to check.

    Args:
        head: head of the base.
        places: `place` of each pin.
        mark: a new mark for this check. It replaces the mark of any other collection, which then does not remove the
            pin.
    """
    marked = tuple(replace(each, doubt=mark) if place(each) in places else each for each in head.pins)
    return replace(head, pins=marked)


def unpin(head: Head, places: Collection[tuple[int, str]], mark: str) -> Head:
    """Remove pins that still have the mark: no version of their adapters was based on the pinned version when the
    adapter's head was read.

    Args:
        head: head of the base.
        places: as for `doubt`.
        mark: the mark that was set.
    """
    return replace(head, pins=tuple(each for each in head.pins if each.doubt != mark or place(each) not in places))


def pinned_by(head: Head, number: int) -> tuple[str, ...]:
    """The adapters that are based on a version."""
    return tuple(each.adapter for each in head.pins if each.version == number)


def sees_all(_adapter: str) -> bool:
    """True for each adapter; used without a policy or without a caller."""
    return True


def adapters_text(adapters: Collection[str], sees: Callable[[str], bool]) -> str:
    """Text about adapters for an error: the names of some that the caller ``sees``, and the number of the others."""
    known = [each for each in adapters if sees(each)]
    hidden = len(adapters) - len(known)
    others = [counted(hidden, "adapter") + " that you may not see"] if hidden else []
    return " and ".join([*([named(known, _NAMED)] if known else []), *others])


def is_on(adapter: History, base: str, number: int) -> bool:
    """Whether any version of an adapter is based on this version of a model. Counts versions that are open, durable, or
    retired and possibly still readable.
    """

    def on(metadata: Metadata) -> bool:
        found = BaseVersion.of(metadata)
        return found is not None and (found.model, found.number) == (base, number)

    stored = (*adapter.versions().values(), *adapter.retired().values())
    return any(on(each.metadata) for each in adapter.head.open.values()) or any(on(each.metadata) for each in stored)


def place(entry: PinEntry) -> tuple[int, str]:
    """The place of a pin: the number of the base's version, and the adapter's name."""
    return entry.version, entry.adapter
