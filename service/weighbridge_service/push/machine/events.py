"""Events of a push: everything that can happen to it, as values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weighbridge.errors import WeighbridgeError
from weighbridge_service.plan.declarations import Declaration, Home
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.push.machine import effects
from weighbridge_service.push.machine.effects import Awaited
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened."""


# --- from ranks, through handlers and the data plane ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankDeclared(Event):
    """A rank has declared its layout to this replica."""

    rank: int
    client_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class FirstByte(Event):
    """The first bytes have come, or a process that writes to the image has said that it has written some."""


@dataclass(frozen=True, slots=True)
class FilesFilled(Event):
    """All bytes of these files are in the image, and no other process can write to them."""

    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class RankWhole(Event):
    """All bytes of a rank's stream that belong to files of this replica are in their place."""

    rank: int


@dataclass(frozen=True, slots=True)
class MemoryMapped(Event):
    """All bytes are here and all grants have ended, but another process can still write to the image."""


@dataclass(frozen=True, slots=True)
class SealAsked(Event):
    """A rank says that it has pushed everything; what it pushed to other replicas has arrived there.

    Attributes:
        rank: which one.
        nonfinite: how many elements of what it has pushed are NaN or infinite; 0 if it has not counted.
    """

    rank: int
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Described(Event):
    """A further rank has said something of the version at its opening: head.json says this of it now."""

    entry: OpenEntry


@dataclass(frozen=True, slots=True)
class Approved(Event):
    """Somebody has approved reasons for which the version is held."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Broken(Event):
    """Bytes were lost or damaged: the version cannot be completed, or is not what was pushed."""

    error: WeighbridgeError


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """Somebody wants the version given up; one that is visible already, only if it cannot be made durable."""

    reason: str


# --- from other replicas -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeardElsewhere(Event):
    """What ranks have declared to other replicas since the last time: ranks and declarations, perhaps none."""

    declarations: Sequence[tuple[int, Declaration]]


@dataclass(frozen=True, slots=True)
class ReplicasTold(Event):
    """Other replicas can read what these ranks have declared here."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReplicaSaid(Event):
    """Another replica says that its part is complete: all bytes of its files are in its image, and its ranks have sealed.

    Attributes:
        replica: its number.
        handed_in: whether these files are in the object store, too.
        nonfinite: how many elements that are NaN or infinite it knows of.
    """

    replica: int
    handed_in: bool
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLost(Event):
    """Another replica is gone, or has given the version up: what it had in memory is lost.

    Attributes:
        replica: its number.
        error: what the version fails of if it depends on that.
    """

    replica: int
    error: WeighbridgeError


@dataclass(frozen=True, slots=True)
class ShareMoved(Event):
    """Another replica, or this one beside its own, has the share of a replica that leaves.

    Attributes:
        replica: the number of the share.
        to: who has it.
        handovers: how often it was handed over by then.
    """

    replica: int
    to: Home
    handovers: int


@dataclass(frozen=True, slots=True)
class SaidPublished(Event):
    """Another replica says that the version is part of history."""


@dataclass(frozen=True, slots=True)
class HandedIn(Event):
    """Other replicas can read which files this one has uploaded."""


@dataclass(frozen=True, slots=True)
class ReplicasHandedIn(Event):
    """The replicas whose uploaded files are known, this one included.

    Attributes:
        replicas: their numbers.
        nonfinite: how many elements in these files are NaN or infinite, by number.
    """

    replicas: frozenset[int]
    nonfinite: Mapping[int, int] = field(default_factory=dict, hash=False)


# --- answers to effects --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The plan is made."""

    prepared: PreparedPush


@dataclass(frozen=True, slots=True)
class ImageGranted(Event):
    """There is an image, and a data plane that takes bytes for it."""


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """head.json records the agreement."""


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The lease in head.json was extended by its whole length from now on."""


@dataclass(frozen=True, slots=True)
class MemoryUnmapped(Event):
    """No other process can write to the image any more."""


@dataclass(frozen=True, slots=True)
class MemoryStillMapped(Event):
    """Another process can still write to the image."""


@dataclass(frozen=True, slots=True)
class Digested(Event):
    """The digests of a file are made; it has so many elements that are NaN or infinite."""

    file: str
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Uploaded(Event):
    """A file is in the object store."""

    file: str


@dataclass(frozen=True, slots=True)
class PerhapsUnchanged(Event):
    """A file has no digests yet by which it can be told from that of the version before, and was not uploaded."""

    file: str


@dataclass(frozen=True, slots=True)
class DigestsUploaded(Event):
    """The block digests of a file are in the object store."""

    file: str


@dataclass(frozen=True, slots=True)
class SampleCompared(Event):
    """The sample agrees with the checksums that came with it."""


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The version is part of history, which says this of it."""

    entry: VersionEntry


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """What had not arrived when nothing more was heard of the ranks.

    Attributes:
        missing: a line for each thing.
        heard_at: when the last bytes came; seconds of the monotonic clock, 0 if none have.
    """

    missing: tuple[str, ...]
    heard_at: float = 0.0


class Verdict(enum.Enum):
    """What head.json says of a version."""

    OPEN = "open"
    PUBLISHED = "published"
    GIVEN_UP = "given up"
    ABORTED = "aborted"
    """Given up because somebody asked for it."""
    UNKNOWN = "unknown"
    """The store could not be read."""


@dataclass(frozen=True, slots=True)
class HeadSaid(Event):
    """What head.json says of the version.

    Attributes:
        effect: by which effect it was read.
        verdict: what it says.
        claim: the agreement under which it is published, or is being written; empty if nobody has claimed it.
        reason: of a version that was given up, why.
        entry: of a version that is published, what history says of it.
        opened: of one that is open, what the head says of it.
    """

    effect: Awaited
    verdict: Verdict
    claim: str = ""
    reason: str = ""
    entry: VersionEntry | None = None
    opened: OpenEntry | None = None


@dataclass(frozen=True, slots=True)
class EffectFailed(Event):
    """An effect could not be carried out."""

    effect: Awaited
    error: WeighbridgeError


@dataclass(frozen=True, slots=True)
class LeftToOthers(Event):
    """The version stays open when this replica gives it up: other replicas have claimed it."""


# --- from the process ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed.

    Attributes:
        received_bytes: of tensors that have come so far.
        heard_at: when the last of them came; seconds of the monotonic clock, 0 if none have.
    """

    received_bytes: int = 0
    heard_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """Another replica has all bytes that this one has, and owns the version, or this one's share of it, from now on.

    Attributes:
        to: which one.
    """

    to: Home


@dataclass(frozen=True, slots=True)
class Superseded(Event):
    """A newer version of the model is visible."""


@dataclass(frozen=True, slots=True)
class Idle(Event):
    """The image of a durable version has not been read for longer than many others."""


@dataclass(frozen=True, slots=True)
class MemoryWanted(Event):
    """A newer version of the model waits for memory."""


@dataclass(frozen=True, slots=True)
class Staying(Event):
    """Another replica stops, or has stopped: ranks come to other ones.

    Attributes:
        replicas: the others, without it.
    """

    replicas: frozenset[Home]


@dataclass(frozen=True, slots=True)
class Draining(Event):
    """The service shuts down: no pauses between attempts from now on, and the next failure is the last before it is handed over.

    Attributes:
        successors: replicas that may take it over, in the order in which they are asked.
        hand_over_at: when they are asked at the latest, if it is not durable by then; seconds of the monotonic clock.
        until: when the service ends.
    """

    successors: tuple[Home, ...] = ()
    hand_over_at: float = 0.0
    until: float = 0.0


_ANSWERS: Mapping[type[Event], Awaited] = {
    HeardElsewhere: effects.HearReplicas(),
    ReplicasTold: effects.TellReplicas(),
    HandedIn: effects.HandIn(),
    ReplicasHandedIn: effects.CollectHandIns(),
    Planned: effects.MakePlan(),
    ImageGranted: effects.AcquireImage(),
    Claimed: effects.Claim(),
    Renewed: effects.Renew(),
    MemoryUnmapped: effects.ProbeMemory(),
    MemoryStillMapped: effects.ProbeMemory(),
    SampleCompared: effects.CompareSample(),
    Published: effects.WriteManifestAndPublish(),
    TimedOut: effects.NameMissing(),
}


def answered_by(event: Event) -> Awaited | None:
    """The effect that an event answers; None if it answers none."""
    match event:
        case HeadSaid(effect=effect) | EffectFailed(effect=effect):
            return effect
        case Digested(file=file):
            return effects.Digest(file)
        case Uploaded(file=file) | PerhapsUnchanged(file=file):
            return effects.Upload(file)
        case DigestsUploaded(file=file):
            return effects.UploadDigests(file)
        case HandedOver(to=to):
            return effects.HandOver(to)
        case _:
            return _ANSWERS.get(type(event))
