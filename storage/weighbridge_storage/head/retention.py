"""Decision which versions of a model are kept, and by what. Everything here is pure.

A version is kept if a ref names it, if an engine serves it, if an adapter is on it, or if one of the rules of the model's retention speaks for it. ``latest`` names the highest
version that is not held, so that one is always kept.

A version that is held never takes the place of one that is not. `Retention.keep_last` speaks for so many of the newest that are not
held and, of those newer than the oldest of these, for as many of the newest that are held: somebody may still look at them or approve
them. A trainer that pushes nothing but NaN any more so loses none of its good versions, and does not fill the store.

`Retention.keep_every` speaks for one version of each slot of so many consecutive numbers: the lowest that is part of history and not
held. What is decided later changes that only if it has to: a version that is kept for this reason is never deleted for another, higher
numbers do not take its place, and numbers are never given twice. Only a lower number of the same slot that is still being
received, or held, takes it when it is published or approved; from then on that one is kept. So a slot that had a version once has one for good, unless
somebody deletes it by hand. `Retention.keep_every_steps` does the same for slots of so many consecutive steps of one run: versions of two runs
never share a slot, and versions that were pushed without a step are of step 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
    """What is to become of the versions in a head.

    Attributes:
        kept: those that stay, by number, and why.
        retired: those that no rule, no ref and no engine speaks for, by number.
    """

    kept: tuple[KeptVersion, ...]
    retired: tuple[int, ...]


NOBODY: Mapping[int, Sequence[str]] = {}
"""No version that an engine serves."""


def decide(
    head: Head,
    versions: Mapping[int, VersionEntry],
    now_ms: int,
    served: Mapping[int, Sequence[str]] = NOBODY,
) -> Decision:
    """Which versions a model's retention keeps.

    Args:
        head: the model's, with its rules and refs.
        versions: those that are part of its history, by number in ascending order.
        now_ms: milliseconds since 1970 UTC.
        served: which engines serve which versions, by number.
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
    """The versions that each rule speaks for."""
    if retention.keeps_everything:
        return {RULE_KEEP_EVERYTHING: set(versions)}
    released = [number for number, entry in versions.items() if not entry.held]
    every, steps = retention.keep_every, retention.keep_every_steps
    of_numbers = _firsts(released, lambda number: number // every) if every else set()
    of_steps = (
        _firsts(released, lambda number: (versions[number].run, versions[number].step // steps))
        if steps
        else set()
    )
    since_ms = now_ms - retention.keep_younger_s * 1000
    return {
        RULE_KEEP_LAST: _last(released, versions.keys(), retention.keep_last),
        RULE_KEEP_EVERY: of_numbers,
        RULE_KEEP_EVERY_STEPS: of_steps,
        RULE_KEEP_YOUNGER: {
            number
            for number, entry in versions.items()
            if retention.keep_younger_s and entry.created_ms > since_ms
        },
    }


def _firsts(released: Sequence[int], slot_of: Callable[[int], Hashable]) -> set[int]:
    """The lowest number of each slot; the numbers are in ascending order."""
    found: dict[Hashable, int] = {}
    for number in released:
        found.setdefault(slot_of(number), number)
    return set(found.values())


def _last(released: Sequence[int], numbers: Iterable[int], count: int) -> set[int]:
    """The newest versions that are not held, and of those newer than the oldest of these as many of the newest that are held.

    Args:
        released: those that are not held, in ascending order.
        numbers: all, likewise.
        count: how many of either.
    """
    if not count:
        return set()
    newest = set(released[-count:])
    since = min(newest) if len(newest) == count else 0
    held = [number for number in numbers if number > since and number not in newest]
    return newest.union(held[-count:])


def retire(
    history: History, now_ms: int, served: Mapping[int, Sequence[str]] = NOBODY
) -> tuple[Head, Decision]:
    """Take the versions that are not to be kept out of history, and give abandoned open versions up. Arguments are those of `decide`.

    Returns:
        The head after that, and what was decided.
    """
    history = history.under(give_up_abandoned(history.head, now_ms))
    decision = decide(history.head, history.versions(), now_ms, served)
    return delete_versions(history, decision.retired, now_ms), decision
