"""Events of a push: the inputs of its state machine."""

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
    """Input of the state machine."""


# --- from ranks, through handlers and the data plane ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankDeclared(Event):
    """A rank has declared its layout to this replica."""

    rank: int
    client_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class FirstByte(Event):
    """The first bytes have arrived, or a process that writes to the image has reported its first ones."""


@dataclass(frozen=True, slots=True)
class FilesFilled(Event):
    """All bytes of these files are in the image, and no other process can write to them."""

    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class RankWhole(Event):
    """All bytes of a rank's stream that belong to files of this replica are in place."""

    rank: int


@dataclass(frozen=True, slots=True)
class MemoryMapped(Event):
    """All bytes have arrived and all grants have ended, but another process can still write to the image."""


@dataclass(frozen=True, slots=True)
class SealAsked(Event):
    """A rank asks to be sealed: it has pushed everything, and its bytes for other replicas have arrived there.

    Attributes:
        rank: the rank.
        nonfinite: number of pushed elements that are NaN or infinite; 0 if the rank has not counted them.
    """

    rank: int
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Described(Event):
    """A further rank has opened the version and added metadata or flags; ``entry`` is the version's entry in head.json
    now.
    """

    entry: OpenEntry


@dataclass(frozen=True, slots=True)
class Approved(Event):
    """A caller has approved reasons for which the version is held."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Broken(Event):
    """Bytes were lost or damaged, or processing an event failed: the version cannot be completed."""

    error: WeighbridgeError


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """A caller aborts the version. A version that is visible already is aborted only if it cannot be made durable."""

    reason: str


# --- from other replicas ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeardElsewhere(Event):
    """Declarations of ranks at other replicas since the last read; may be empty."""

    declarations: Sequence[tuple[int, Declaration]]


@dataclass(frozen=True, slots=True)
class ReplicasTold(Event):
    """Other replicas can read the declarations of these ranks."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReplicaSaid(Event):
    """Another replica reports that its part is complete: all bytes of its files are in its image, and its ranks are
    sealed.

    Attributes:
        replica: its number.
        handed_in: whether these files are in the object store, too.
        nonfinite: number of elements that it knows to be NaN or infinite.
    """

    replica: int
    handed_in: bool
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLost(Event):
    """Another replica is gone, or has given the version up: the bytes in its memory are lost.

    Attributes:
        replica: its number.
        error: error of the version if it depends on these bytes.
    """

    replica: int
    error: WeighbridgeError


@dataclass(frozen=True, slots=True)
class ShareMoved(Event):
    """The share of a stopping replica has moved to another replica, or to this one in addition to its own.

    Attributes:
        replica: the number of the share.
        to: the replica that holds it now.
        handovers: number of its handovers so far.
    """

    replica: int
    to: Home
    handovers: int


@dataclass(frozen=True, slots=True)
class SaidPublished(Event):
    """Another replica reports that the version is part of history."""


@dataclass(frozen=True, slots=True)
class HandedIn(Event):
    """Other replicas can read the list of files that this one has uploaded."""


@dataclass(frozen=True, slots=True)
class ReplicasHandedIn(Event):
    """Replicas whose uploaded files are known, this one included.

    Attributes:
        replicas: their numbers.
        nonfinite: number of elements in the files of each that are NaN or infinite, by the replica's number.
    """

    replicas: frozenset[int]
    nonfinite: Mapping[int, int] = field(default_factory=dict, hash=False)


# --- answers to effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The plan is made."""

    prepared: PreparedPush


@dataclass(frozen=True, slots=True)
class ImageGranted(Event):
    """The image is allocated, and the data plane takes bytes for it."""


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """head.json records the agreement."""


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The lease in head.json was renewed: it runs for its whole length from now."""


@dataclass(frozen=True, slots=True)
class MemoryUnmapped(Event):
    """No other process can write to the image any more."""


@dataclass(frozen=True, slots=True)
class MemoryStillMapped(Event):
    """Another process can still write to the image."""


@dataclass(frozen=True, slots=True)
class Digested(Event):
    """The digests of a file are computed; ``nonfinite`` of its elements are NaN or infinite."""

    file: str
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Uploaded(Event):
    """A file is in the object store."""

    file: str


@dataclass(frozen=True, slots=True)
class PerhapsUnchanged(Event):
    """A file was not uploaded: it may equal the parent version's, and there are no digests yet to compare them."""

    file: str


@dataclass(frozen=True, slots=True)
class DigestsUploaded(Event):
    """The block digests of a file are in the object store."""

    file: str


@dataclass(frozen=True, slots=True)
class SampleCompared(Event):
    """The sample agrees with the checksums that ranks sent."""


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The version is part of history; ``entry`` is its entry there."""

    entry: VersionEntry


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The receive timeout has passed without activity of any rank.

    Attributes:
        missing: ranks and shards that have not arrived, one line each.
        heard_at: when the last bytes arrived; seconds of the monotonic clock, 0 if none have.
    """

    missing: tuple[str, ...]
    heard_at: float = 0.0


class Verdict(enum.Enum):
    """State of a version in head.json."""

    OPEN = "open"
    PUBLISHED = "published"
    GIVEN_UP = "given up"
    ABORTED = "aborted"
    """Given up because a caller has aborted it."""
    UNKNOWN = "unknown"
    """The store could not be read."""


@dataclass(frozen=True, slots=True)
class HeadSaid(Event):
    """State of the version as read from head.json.

    Attributes:
        effect: the effect that has read it.
        verdict: the state.
        claim: the agreement under which the version is published, or is being written; empty if no replica has claimed
            it.
        reason: reason for which a version was given up.
        entry: entry of a published version in history.
        opened: entry of an open version in the head.
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
    """The version stays open although this replica gives it up: other replicas have claimed it."""


# --- from the process -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed.

    Attributes:
        received_bytes: bytes of tensors that have arrived so far.
        heard_at: when the last of them arrived; seconds of the monotonic clock, 0 if none have.
    """

    received_bytes: int = 0
    heard_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """Another replica has all bytes that this one has, and owns the version, or this replica's share of it, from now
    on.

    Attributes:
        to: that replica.
    """

    to: Home


@dataclass(frozen=True, slots=True)
class Superseded(Event):
    """A newer version of the model is visible."""


@dataclass(frozen=True, slots=True)
class Idle(Event):
    """The image of a durable version is among the least recently read ones, and is not kept any longer."""


@dataclass(frozen=True, slots=True)
class MemoryWanted(Event):
    """A newer version of the model waits for memory."""


@dataclass(frozen=True, slots=True)
class Staying(Event):
    """Another replica stops, or has stopped: its ranks declare at other replicas.

    Attributes:
        replicas: the replicas that stay.
    """

    replicas: frozenset[Home]


@dataclass(frozen=True, slots=True)
class Draining(Event):
    """The service shuts down. Failed effects are retried at once; after the next failure the version is handed over.

    Attributes:
        successors: replicas that may take the version over, in the order in which they are asked.
        hand_over_at: latest time at which they are asked, if the version is not durable by then; seconds of the
            monotonic clock.
        until: when the service ends; seconds of the monotonic clock.
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
