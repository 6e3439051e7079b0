"""Decision which versions of a model are kept, and by what. Everything here is pure.

A version is kept if a ref names it, or if one of the rules of the model's retention speaks for it. ``latest`` names the highest
version, so that one is always kept.

`Retention.keep_every` speaks for one version of each slot of so many consecutive numbers: the lowest that is part of history. What
is decided later changes that only if it has to: a version that is kept for this reason is never deleted for another, higher
numbers do not take its place, and numbers are never given twice. Only a lower number of the same slot that is still being
received takes it when it is published; from then on that one is kept. So a slot that had a version once has one for good, unless
somebody deletes it by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from weighbridge.collection import (
    RULE_KEEP_EVERY,
    RULE_KEEP_EVERYTHING,
    RULE_KEEP_LAST,
    RULE_KEEP_YOUNGER,
    KeptVersion,
)
from weighbridge.resources import Retention
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import delete_versions, give_up_abandoned
from weighbridge_storage.history import History


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to become of the versions in a head.

    Attributes:
        kept: those that stay, by number, and why.
        retired: those that no rule and no ref speaks for, by number.
    """

    kept: tuple[KeptVersion, ...]
    retired: tuple[int, ...]


def decide(head: Head, versions: Mapping[int, VersionEntry], now_ms: int) -> Decision:
    """Which versions a model's retention keeps.

    Args:
        head: the model's, with its rules and refs.
        versions: those that are part of its history, by number in ascending order.
        now_ms: milliseconds since 1970 UTC.
    """
    rules = _rules(head.retention, versions, now_ms)
    refs: defaultdict[int, list[str]] = defaultdict(list)
    for name, number in sorted(head.ref_numbers.items()):
        refs[number].append(name)
    kept, retired = [], []
    for number in versions:
        speaking = tuple(rule for rule, numbers in rules.items() if number in numbers)
        if speaking or number in refs:
            kept.append(KeptVersion(number, speaking, tuple(refs.get(number, ()))))
        else:
            retired.append(number)
    return Decision(tuple(kept), tuple(retired))


def _rules(retention: Retention, versions: Mapping[int, VersionEntry], now_ms: int) -> dict[str, set[int]]:
    """The versions that each rule speaks for."""
    numbers = list(versions)
    if retention.keeps_everything:
        return {RULE_KEEP_EVERYTHING: set(numbers)}
    first_of_slot: dict[int, int] = {}
    if retention.keep_every:
        for number in numbers:
            first_of_slot.setdefault(number // retention.keep_every, number)
    since_ms = now_ms - retention.keep_younger_s * 1000
    return {
        RULE_KEEP_LAST: set(numbers[-retention.keep_last :] if retention.keep_last else ()),
        RULE_KEEP_EVERY: set(first_of_slot.values()),
        RULE_KEEP_YOUNGER: {
            number
            for number, entry in versions.items()
            if retention.keep_younger_s and entry.created_ms > since_ms
        },
    }


def retire(history: History, now_ms: int) -> tuple[Head, Decision]:
    """Take the versions that are not to be kept out of history, and give abandoned open versions up.

    Returns:
        The head after that, and what was decided.
    """
    history = history.under(give_up_abandoned(history.head, now_ms))
    decision = decide(history.head, history.versions(), now_ms)
    return delete_versions(history, decision.retired, now_ms), decision
