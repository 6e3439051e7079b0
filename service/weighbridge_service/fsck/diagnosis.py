"""Diagnosis of one model: what is wrong, and the head that would be right. Pure: it looks only at a survey.

A version that is **whole** has a manifest, and all files that it lists with the sizes that it says. Where the head or a part of its history
is lost, whole versions say what it said, but for refs, retention, and which versions were deleted a short time ago.
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
"""How many numbers are left out where the head was lost or is older than the store: versions that were given up have left nothing
that says so."""
FARTHEST = 1_000_000
"""How far above all numbers that are known to have been given others may have been: what lies under a higher one is not
Weighbridge's, and must not make a model run out of numbers."""
_MOST_TOLD = 5
"""Of what is wrong with one version: a manifest can list any number of files."""


class Mend(StrEnum):
    """How a finding can be mended."""

    NONE = "none"
    HEAD = "head"
    """By writing the head."""
    DROP = "drop"
    """By retiring the version; only if that is asked for, as its files may be restored."""
    DIGESTS = "digests"
    """By making the block digests anew."""
    FILES = "files"
    """By copying a registered file from a version."""
    STRAY = "stray"
    """By deleting objects that no head leads to."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        what: in one sentence.
        mend: how it can be mended.
        number: which version it concerns; None if it is the model as a whole.
        name: which file, if it is one.
    """

    what: str
    mend: Mend
    number: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a model.

    Attributes:
        findings: all of it.
        adopted: whole versions that are to become part of history.
        corrected: versions whose entries are to say what their manifests say.
        rebuild: whether the history is to be written anew.
    """

    findings: tuple[Finding, ...] = ()
    adopted: tuple[int, ...] = ()
    corrected: tuple[int, ...] = ()
    rebuild: bool = False

    def numbers(self, mend: Mend) -> tuple[int, ...]:
        """The versions that findings of this kind are about."""
        return tuple(f.number for f in self.findings if f.mend is mend and f.number is not None)


def diagnose(survey: Survey, now_ms: int) -> Diagnosis:
    """What is wrong with a model.

    Args:
        survey: what its objects say.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    if survey.foreign:
        return Diagnosis((Finding(survey.unreadable, Mend.NONE),))
    if survey.head is None and survey.text is None and not survey.versions and not survey.last_node:
        return Diagnosis()  # files of a registration that never came to its end
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
        *(
            Finding(f"{name}, which is registered, is missing", Mend.FILES, name=name)
            for name in survey.lost_files
        ),
    ]
    if any(numbers.is_strange(number) for number in survey.versions):
        # a head written now would say that these versions are gone
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
    """The head that would be right; ``base`` itself if that is it.

    Args:
        survey: what the model's objects say.
        diagnosis: what is wrong.
        base: the head that is there, with a registration by which the model can be loaded; or one that has nothing else.
        entry_of: gives the entry of a version that is to be adopted or corrected.
        dropped: versions that are to be retired.
        now_ms: when that is, in milliseconds since 1970 UTC.
    """
    changed = {number: entry_of(number) for number in (*diagnosis.adopted, *diagnosis.corrected)}
    changed |= {
        number: replace(changed.get(number, survey.entries[number]), retired_ms=now_ms) for number in dropped
    }
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
    """The refs that name a version which is there; ``latest`` names the highest one that is not held."""
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
    """The highest number that was ever given, as far as anything that is there says so."""
    known = max(
        [0 if survey.head is None else survey.head.next_version - 1, *survey.entries]
        + [number for number, folder in survey.versions.items() if folder.described is not None]
    )
    return max([known, *(number for number in survey.folders if number <= known + FARTHEST)])


class _Numbers:
    """What the numbers of a model stand for.

    Args:
        survey: what its objects say.
        believed: whether a number of which the head knows nothing was given up or deleted. Not if manifests contradict the head, or a
            part of its history is lost: a damaged reference to a node may also say less numbers than were below it.
    """

    def __init__(self, survey: Survey, *, believed: bool) -> None:
        self.survey = survey
        self.highest = _highest_given(survey)
        self._believed = believed

    def is_adoptable(self, number: int, now_ms: int) -> bool:
        """Whether a version is whole, in no history, and not known to have been given up or deleted."""
        if number in self.survey.entries or not self.survey.versions[number].whole:
            return False
        there = None if self.survey.head is None else self.survey.head.open.get(number)
        if (
            there is not None
        ):  # its manifest is written last; whoever wrote it has died before it was published
            return there.until_ms < now_ms
        return not self.is_gone(number)

    def is_gone(self, number: int) -> bool:
        """Whether a number is known to have been given, and to stand for nothing any more."""
        head = self.survey.head
        if (
            head is None
            or number >= head.next_version
            or number in self.survey.entries
            or number in head.open
        ):
            return False
        # what is below the first is of a model that was deleted
        return self._believed or number in head.failed or number < head.first_version

    def is_strange(self, number: int) -> bool:
        """Whether another release has written a version of which the head knows nothing."""
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
        yield Finding(
            f"the history of versions {max(node.first, 1)} to {node.last} is lost: {why}", Mend.HEAD
        )
    if numbers.highest >= head.next_version:
        yield Finding(
            f"the head is older than the store: its next version is {head.next_version}, and there are objects of "
            f"{numbers.highest}",
            Mend.HEAD,
        )
    for name, ref in head.refs.items():
        entry = survey.entries.get(ref.version)
        if (entry is None or entry.retired) and ref.version not in adopted:
            yield Finding(f"the ref {name} names version {ref.version}, which is not there", Mend.HEAD)


def _findings_of_version(
    numbers: _Numbers, number: int, folder: VersionFolder, adopted: bool
) -> Iterator[Finding]:
    entry = numbers.survey.entries.get(number)
    if entry is None and not adopted:
        yield from _findings_of_stray(numbers, number, folder)
        return
    if adopted:
        held = folder.described.held if folder.described is not None else ()
        until = f"; it was held ({', '.join(held)}), and will be until it is approved" if held else ""
        yield Finding(f"is whole, and in no history{until}", Mend.HEAD, number)
    elif folder.foreign:
        yield Finding(f"cannot be checked: {folder.problems[0]}", Mend.NONE, number)
        return
    said = folder.described
    wrong = said.contradictions(entry) if said is not None and entry is not None else ()
    if wrong:
        yield Finding(
            f"its entry in the history says another {', '.join(wrong)} than its manifest", Mend.HEAD, number
        )
    if not folder.whole:
        if entry is not None and not entry.retired:  # otherwise it may be half deleted
            yield Finding(_told(folder.problems), Mend.DROP, number)
        return
    for name in folder.bad_blocks:
        yield Finding(f"{name}{BLOCKS_SUFFIX} is missing or has another size", Mend.DIGESTS, number, name)


def _findings_of_stray(numbers: _Numbers, number: int, folder: VersionFolder) -> Iterator[Finding]:
    head = numbers.survey.head
    if head is not None and number in head.open:
        return  # it is being received
    if head is not None and number < head.first_version:
        return  # of a model that was deleted: collections take it once nobody reads it any more
    objects = counted(len(numbers.survey.folders[number]), "object")
    if number > numbers.highest:
        yield Finding(
            f"{objects} under a number that Weighbridge has not come to, and not its own",
            Mend.NONE,
            number,
        )
    elif numbers.is_strange(number):
        yield Finding(f"is in no history that can be read here: {folder.problems[0]}", Mend.NONE, number)
    elif numbers.is_gone(number) or (
        head is not None and number >= head.next_version and not folder.has_manifest
    ):
        yield Finding(f"{objects} of a version that is in no history", Mend.STRAY, number)
    else:
        yield Finding(
            f"is in no history and not whole, and will be swept away by a collection: {_told(folder.problems)}",
            Mend.NONE,
            number,
        )


def _told(problems: Sequence[str]) -> str:
    """Problems in one sentence; of many the first."""
    left = len(problems) - _MOST_TOLD
    return "; ".join(problems[:_MOST_TOLD]) + (f"; and {left} more" if left > 0 else "")
