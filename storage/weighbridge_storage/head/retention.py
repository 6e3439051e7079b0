"""Decision which versions of a model are kept, with the reasons. All functions are pure.

A version is kept if a ref names it, an engine serves it, an adapter is based on it, or a rule of the model's retention
selects it. ``latest`` names the highest version that is not held, so this version is always kept.

A held version never displaces a version that is not held. `Retention.keep_last` selects that many of the newest
versions that are not held. Among the versions newer than the oldest of these, it also selects as many of the newest
held versions, because they may still be approved. So a trainer that pushes only NaN from some step on does not lose any
of its good versions, and does not fill the store.

`Retention.keep_every` selects one version of each slot of that many consecutive numbers: the lowest number that is part
of history and not held. Higher numbers do not replace a selected version, and numbers are never reused. Later decisions
change the selection in one case only: a lower number of the same slot that was still being received, or held, replaces
the selected version when it is published or approved. So a slot that once had a version always has one, unless it is
deleted manually. `Retention.keep_every_steps` does the same for slots of that many consecutive steps of one run:
versions of two runs never share a slot, and versions that were pushed without a step count as step 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.reports.collection import (
    RULE_ADAPTERS,
    RULE_KEEP_EVERY,
    RULE_KEEP_EVERY_STEPS,
    RULE_KEEP_EVERYTHING,
    RULE_KEEP_LAST,
    RULE_KEEP_YOUNGER,
    KeptVersion,
)
from weighbridge._core.resources import Retention
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import delete_versions
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import give_up_abandoned


@dataclass(frozen=True, slots=True)
class Decision:
    """Retention's decision about the versions in a head.

    Attributes:
        kept: versions that stay, by number, with the reasons.
        retired: numbers of versions that are not kept by any rule, ref, engine or adapter.
    """

    kept: tuple[KeptVersion, ...]
    retired: tuple[int, ...]


NOBODY: Mapping[int, Sequence[str]] = {}
"""Versions served by engines, if there are no engines."""


def decide(
    head: Head,
    versions: Mapping[int, VersionEntry],
    now_ms: int,
    served: Mapping[int, Sequence[str]] = NOBODY,
) -> Decision:
    """Decide which versions a model's retention keeps.

    Args:
        head: the model's head, with its rules and refs.
        versions: versions that are part of its history, by number in ascending order.
        now_ms: current time in milliseconds since 1970 UTC.
        served: names of the engines that serve each version, by its number.
    """
    rules = _rules(head.retention, versions, now_ms)
    refs: defaultdict[int, list[str]] = defaultdict(list)
    for name, number in sorted([*head.ref_numbers.items(), *head.requested(now_ms).items()]):
        refs[number].append(name)
    pinned = {pin.version for pin in head.pins}
    kept, retired = [], []
    for number in versions:
        speaking = tuple(rule for rule, numbers in rules.items() if number in numbers)
        if number in pinned:
            speaking = (*speaking, RULE_ADAPTERS)
        engines = tuple(served.get(number, ()))
        if speaking or engines or number in refs:
            kept.append(KeptVersion(number, speaking, tuple(refs.get(number, ())), engines))
        else:
            retired.append(number)
    return Decision(tuple(kept), tuple(retired))


def _rules(retention: Retention, versions: Mapping[int, VersionEntry], now_ms: int) -> dict[str, set[int]]:
    """The versions that each rule selects."""
    if retention.keeps_everything:
        return {RULE_KEEP_EVERYTHING: set(versions)}
    released = [number for number, entry in versions.items() if not entry.held]
    every, steps = retention.keep_every, retention.keep_every_steps
    of_numbers = _firsts(released, lambda number: number // every) if every else set()
    of_steps = (
        _firsts(released, lambda number: (versions[number].run, versions[number].step // steps)) if steps else set()
    )
    since_ms = now_ms - retention.keep_younger_s * 1000
    return {
        RULE_KEEP_LAST: _last(released, versions.keys(), retention.keep_last),
        RULE_KEEP_EVERY: of_numbers,
        RULE_KEEP_EVERY_STEPS: of_steps,
        RULE_KEEP_YOUNGER: {
            number for number, entry in versions.items() if retention.keep_younger_s and entry.created_ms > since_ms
        },
    }


def _firsts(released: Sequence[int], slot_of: Callable[[int], Hashable]) -> set[int]:
    """The lowest number of each slot; the numbers are in ascending order."""
    found: dict[Hashable, int] = {}
    for number in released:
        found.setdefault(slot_of(number), number)
    return set(found.values())


def _last(released: Sequence[int], numbers: Iterable[int], count: int) -> set[int]:
    """The newest versions that are not held and, among those newer than the oldest of these, as many of the newest held
    versions.

    Args:
        released: numbers of versions that are not held, in ascending order.
        numbers: numbers of all versions, in ascending order.
        count: maximum number of versions of either kind.
    """
    if not count:
        return set()
    newest = set(released[-count:])
    since = min(newest) if len(newest) == count else 0
    held = [number for number in numbers if number > since and number not in newest]
    return newest.union(held[-count:])


def retire(
    history: History, now_ms: int, served: Mapping[int, Sequence[str]] = NOBODY, present: Container[int] = ()
) -> tuple[Head, Decision]:
    """Retire the versions that are not kept, and close abandoned open versions, except those ``present`` in this
    process. Other arguments are those of `decide`.

    Returns:
        The resulting head, and the decision.
    """
    history = history.under(give_up_abandoned(history.head, now_ms, present))
    decision = decide(history.head, history.versions(), now_ms, served)
    return delete_versions(history, decision.retired, now_ms), decision
