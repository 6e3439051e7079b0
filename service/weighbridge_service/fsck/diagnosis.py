"""Diagnosis of one model: findings, and the repaired head.

The functions are pure; the diagnosis depends only on a survey.

A version is **whole** if it has a manifest and if all files in the manifest exist with the right sizes. If the head or
a part of its history is lost, it is rebuilt from whole versions. Only refs, retention, and the record of recently
deleted versions cannot be rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from weighbridge._core.resources import REF_LATEST
from weighbridge._core.text.counts import counted
from weighbridge_service.fsck.survey import Survey, VersionFolder
from weighbridge_storage.documents.entries import Ref, VersionEntry
from weighbridge_storage.documents.names import BLOCKS_SUFFIX, MAX_VERSION
from weighbridge_storage.head.head import Head

UNKNOWN_NUMBERS = 1000
"""Number of version numbers that are skipped if the head was lost or is older than the store. Failed versions do not
leave a trace, and their numbers must not be reused.
"""
FARTHEST = 1_000_000
"""Maximum distance of a used number above all known used numbers. Objects under a higher number were not written by
Weighbridge, and must not make a model run out of numbers.
"""
_MOST_TOLD = 5
"""Maximum number of problems in a finding about one version, because a manifest can list any number of files."""


class Mend(StrEnum):
    """Repair of a finding."""

    NONE = "none"
    HEAD = "head"
    """Write the head."""
    DROP = "drop"
    """Retire the version; only on request, because its files could be restored from a backup."""
    DIGESTS = "digests"
    """Compute the block digests again."""
    FILES = "files"
    """Copy a registered file from a version."""
    STRAY = "stray"
    """Delete objects that no head refers to."""


@dataclass(frozen=True)
class Finding:
    """One problem of a model.

    Attributes:
        what: the problem in one sentence.
        mend: repair of the problem.
        number: number of the version; None if the finding is about the whole model.
        name: name of the file, if the finding is about a file.
    """

    what: str
    mend: Mend
    number: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All problems of a model.

    Attributes:
        findings: all findings.
        adopted: numbers of whole versions to add to the history.
        corrected: numbers of versions whose entries must be corrected by their manifests.
        rebuild: whether the history must be rewritten.
    """

    findings: tuple[Finding, ...] = ()
    adopted: tuple[int, ...] = ()
    corrected: tuple[int, ...] = ()
    rebuild: bool = False

    def numbers(self, mend: Mend) -> tuple[int, ...]:
        """Version numbers of the findings with this repair."""
        return tuple(f.number for f in self.findings if f.mend is mend and f.number is not None)


def diagnose(survey: Survey, now_ms: int) -> Diagnosis:
    """Diagnose a model.

    Args:
        survey: survey of the model.
        now_ms: current time in milliseconds since 1970 UTC.
    """
    if survey.foreign:
        return Diagnosis((Finding(survey.unreadable, Mend.NONE),))
    if survey.head is None and survey.text is None and not survey.versions and not survey.last_node:
        return Diagnosis()  # the model has only files of a registration that was not completed
    corrected = tuple(
        number
        for number, entry in survey.entries.items()
        if (said := survey.versions[number].described) is not None and said.contradictions(entry)
    )
    numbers = _Numbers(survey, believed=not corrected and not survey.lost_nodes)
    adopted = tuple(number for number in survey.versions if numbers.is_adoptable(number, now_ms))
    findings = [
        *_findings_of_head(survey, numbers, adopted),
        *(
            finding
            for number, folder in survey.versions.items()
            for finding in _findings_of_version(numbers, number, folder, number in adopted)
        ),
        *(Finding(f"{name}, which is registered, is missing", Mend.FILES, name=name) for name in survey.lost_files),
    ]
    if any(numbers.is_strange(number) for number in survey.versions):
        # a head written by this release would record these versions as deleted
        left_alone = (Mend.HEAD, Mend.DROP)
        findings = [replace(f, mend=Mend.NONE) if f.mend in left_alone else f for f in findings]
        adopted = corrected = ()
    rebuild = survey.head is None or bool(survey.lost_nodes)
    return Diagnosis(tuple(findings), adopted, corrected, rebuild)


def repaired_head(
    survey: Survey,
    diagnosis: Diagnosis,
    base: Head,
    entry_of: Callable[[int], VersionEntry],
    dropped: Collection[int],
    now_ms: int,
) -> Head:
    """The repaired head; equal to ``base`` if it needs no repair.

    Args:
        survey: survey of the model.
        diagnosis: diagnosis of the model.
        base: the current head with a valid registration, or a new head with only a registration.
        entry_of: returns the entry of a version to adopt or correct.
        dropped: numbers of versions to retire.
        now_ms: time of their retirement, in milliseconds since 1970 UTC.
    """
    changed = {number: entry_of(number) for number in (*diagnosis.adopted, *diagnosis.corrected)}
    changed |= {number: replace(changed.get(number, survey.entries[number]), retired_ms=now_ms) for number in dropped}
    entries = {**survey.entries, **changed}
    durable = {number: entry for number, entry in entries.items() if not entry.retired}
    after = replace(
        base,
        next_version=_next_version(survey, base),
        refs=_refs(base.refs, durable),
        open={number: entry for number, entry in base.open.items() if number not in changed},
        failed={number: entry for number, entry in base.failed.items() if number not in changed},
        removed=base.removed - changed.keys(),
        recent={**base.recent, **changed},
    )
    if not diagnosis.rebuild:
        return after
    return replace(after, removed=frozenset(), recent=entries, root=None, mark=None)


def _refs(refs: Mapping[str, Ref], durable: Mapping[int, VersionEntry]) -> dict[str, Ref]:
    """Refs to durable versions. ``latest`` refers to the highest version that is not held."""
    kept = {name: ref for name, ref in refs.items() if ref.version in durable}
    highest = max((number for number, entry in durable.items() if not entry.held), default=0)
    if highest:
        there = kept.get(REF_LATEST, refs.get(REF_LATEST, Ref(highest)))
        kept[REF_LATEST] = replace(there, version=highest)
    return kept


def _next_version(survey: Survey, base: Head) -> int:
    highest = _highest_given(survey)
    if survey.head is not None and highest < base.next_version:
        return base.next_version
    return min(highest + 1 + UNKNOWN_NUMBERS, MAX_VERSION + 1)


def _highest_given(survey: Survey) -> int:
    """The highest number that was ever assigned, according to the head, entries, manifests and folders."""
    known = max(
        [0 if survey.head is None else survey.head.next_version - 1, *survey.entries]
        + [number for number, folder in survey.versions.items() if folder.described is not None]
    )
    return max([known, *(number for number in survey.folders if number <= known + FARTHEST)])


class _Numbers:
    """States of the version numbers of a model.

    Args:
        survey: survey of the model.
        believed: whether an assigned number without an entry in the head is a failed or deleted version. False if
            manifests contradict the head, or a part of its history is lost, because a damaged reference to a node may
            also have a wrong range of numbers.
    """

    def __init__(self, survey: Survey, *, believed: bool) -> None:
        self.survey = survey
        self.highest = _highest_given(survey)
        self._believed = believed

    def is_adoptable(self, number: int, now_ms: int) -> bool:
        """Whether a version is whole, not in the history, and not known to have failed or to be deleted."""
        if number in self.survey.entries or not self.survey.versions[number].whole:
            return False
        there = None if self.survey.head is None else self.survey.head.open.get(number)
        if there is not None:
            # the manifest is written last: the version is complete, and its writer has died before publishing it
            return there.until_ms < now_ms
        return not self.is_gone(number)

    def is_gone(self, number: int) -> bool:
        """Whether a number was assigned to a version that is known to have failed or to be deleted."""
        head = self.survey.head
        if head is None or number >= head.next_version or number in self.survey.entries or number in head.open:
            return False
        # numbers below the first one belong to a deleted model of the same name
        return self._believed or number in head.failed or number < head.first_version

    def is_strange(self, number: int) -> bool:
        """Whether another release has written a version that the head does not contain."""
        head = self.survey.head
        known = number in self.survey.entries or (head is not None and number in head.open)
        return self.survey.versions[number].foreign and not known and not self.is_gone(number)


def _findings_of_head(survey: Survey, numbers: _Numbers, adopted: Collection[int]) -> Iterator[Finding]:
    head = survey.head
    if head is None:
        yield Finding(survey.unreadable, Mend.HEAD)
        return
    if survey.unregistered:
        yield Finding(survey.unregistered, Mend.HEAD)
    for node, why in survey.lost_nodes:
        yield Finding(f"the history of versions {max(node.first, 1)} to {node.last} is lost: {why}", Mend.HEAD)
    if numbers.highest >= head.next_version:
        yield Finding(
            f"the head is older than the store: its next version is {head.next_version}, and there are objects of "
            f"{numbers.highest}",
            Mend.HEAD,
        )
    for name, ref in head.refs.items():
        entry = survey.entries.get(ref.version)
        if (entry is None or entry.retired) and ref.version not in adopted:
            yield Finding(f"the ref {name} names version {ref.version}, which does not exist", Mend.HEAD)


def _findings_of_version(numbers: _Numbers, number: int, folder: VersionFolder, adopted: bool) -> Iterator[Finding]:
    entry = numbers.survey.entries.get(number)
    if entry is None and not adopted:
        yield from _findings_of_stray(numbers, number, folder)
        return
    if adopted:
        held = folder.described.held if folder.described is not None else ()
        until = f"; it was held ({', '.join(held)}), and will be until it is approved" if held else ""
        yield Finding(f"is whole, but not in the history{until}", Mend.HEAD, number)
    elif folder.foreign:
        yield Finding(f"cannot be checked: {folder.problems[0]}", Mend.NONE, number)
        return
    said = folder.described
    wrong = said.contradictions(entry) if said is not None and entry is not None else ()
    if wrong:
        yield Finding(
            f"its entry in the history has a different {', '.join(wrong)} than its manifest",
            Mend.HEAD,
            number,
        )
    if not folder.whole:
        if entry is not None and not entry.retired:  # a collection may delete retired versions
            yield Finding(_told(folder.problems), Mend.DROP, number)
        return
    for name in folder.bad_blocks:
        yield Finding(f"{name}{BLOCKS_SUFFIX} is missing or has another size", Mend.DIGESTS, number, name)


def _findings_of_stray(numbers: _Numbers, number: int, folder: VersionFolder) -> Iterator[Finding]:
    head = numbers.survey.head
    if head is not None and number in head.open:
        return  # the version is being received
    if head is not None and number < head.first_version:
        return  # the version belongs to a deleted model, and collections delete it after its grace time
    objects = counted(len(numbers.survey.folders[number]), "object")
    if number > numbers.highest:
        yield Finding(
            f"{objects} under a number that Weighbridge has not reached; it did not write them",
            Mend.NONE,
            number,
        )
    elif numbers.is_strange(number):
        yield Finding(f"is in no history that can be read here: {folder.problems[0]}", Mend.NONE, number)
    elif numbers.is_gone(number) or (head is not None and number >= head.next_version and not folder.has_manifest):
        yield Finding(f"{objects} of a version that is in no history", Mend.STRAY, number)
    else:
        yield Finding(
            f"is in no history and not whole, and a collection will delete it: {_told(folder.problems)}",
            Mend.NONE,
            number,
        )


def _told(problems: Sequence[str]) -> str:
    """One sentence with the first `_MOST_TOLD` problems and the number of the others."""
    left = len(problems) - _MOST_TOLD
    return "; ".join(problems[:_MOST_TOLD]) + (f"; and {left} more" if left > 0 else "")
