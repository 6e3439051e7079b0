"""Effects of a push: what its owner is to do outside of the state machine.

An awaited effect is answered by an event, exactly once, and is not started again before that; `EffectFailed` answers any of them.
A release ends something and is answered by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from weighbridge.errors import WeighbridgeError
from weighbridge_service.plan.declarations import Home, KnownSet


class Pool(StrEnum):
    """Threads of effects of one kind. Calls of the store are kinds by what waits for them: where it hangs, no kind keeps the others from it."""

    PLAN = "plan"
    IMAGE = "image"
    DIGEST = "digest"
    UPLOAD = "upload"
    READ = "read"
    """Looks at heads, and at what other replicas have said."""
    LEASE = "lease"
    CONFIRM = "confirm"
    """Versions that are about to become ready: ranks wait for that."""
    PUBLISH = "publish"
    """Manifests, and messages to other replicas."""
    CLEAN = "clean"
    """Versions that were given up and are deleted."""
    HANDOVER = "handover"


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do.

    Attributes:
        WORDS: what it is called in messages.
        POOL: threads that it runs on; None if it takes no time, and is done at once.
        SPAN: its name in traces; empty if they do not show it, like questions that are asked again and again.
    """

    WORDS: ClassVar[str] = ""
    POOL: ClassVar[Pool | None] = None
    SPAN: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.WORDS


@dataclass(frozen=True, slots=True)
class Awaited(Effect):
    """Something to do that is answered by an event."""


@dataclass(frozen=True, slots=True)
class MakePlan(Awaited):
    """Share the shards out and plan the copies, from the declarations of all ranks. `Planned`."""

    WORDS = "the plan of the push"
    POOL = Pool.PLAN
    SPAN = "plan"


@dataclass(frozen=True, slots=True)
class AcquireImage(Awaited):
    """Get memory for the files of this replica, and write their headers. `ImageGranted`."""

    WORDS = "the allocation of its image"
    POOL = Pool.IMAGE


@dataclass(frozen=True, slots=True)
class Claim(Awaited):
    """Record the agreement in head.json, as the only one that may write the version's folder. `Claimed`."""

    WORDS = "its claim in head.json"
    POOL = Pool.LEASE
    SPAN = "claim"


@dataclass(frozen=True, slots=True)
class Renew(Awaited):
    """Extend the lease of the open version in head.json. `Renewed`."""

    WORDS = "the renewal of its lease"
    POOL = Pool.LEASE


@dataclass(frozen=True, slots=True)
class LookAtHead(Awaited):
    """Read what head.json says of the version. `HeadSaid`.

    Attributes:
        closing: whether versions whose lease has expired are closed on the way.
    """

    WORDS = "the look at head.json"
    POOL = Pool.READ

    closing: bool = False


@dataclass(frozen=True, slots=True)
class Confirm(Awaited):
    """Read once more, when everything is here, whether the version is still open. `HeadSaid`."""

    WORDS = "the last look at head.json"
    POOL = Pool.CONFIRM
    SPAN = "confirm"


@dataclass(frozen=True, slots=True)
class FindOut(Awaited):
    """After a publication that has failed: read whether it was made all the same. `HeadSaid`."""

    WORDS = "the question whether it was published"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class TellReplicas(Awaited):
    """Tell other replicas what ranks have declared here. `ReplicasTold`."""

    WORDS = "the word to other replicas of what ranks have declared"
    POOL = Pool.PUBLISH


@dataclass(frozen=True, slots=True)
class HearReplicas(Awaited):
    """Read what ranks have declared to other replicas. `HeardElsewhere`."""

    WORDS = "the word of other replicas of what ranks have declared"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class HandIn(Awaited):
    """Tell other replicas which files this one has uploaded, and their digests. `HandedIn`."""

    WORDS = "the handing in of its files"
    POOL = Pool.PUBLISH
    SPAN = "hand_in"


@dataclass(frozen=True, slots=True)
class CollectHandIns(Awaited):
    """Read which files other replicas have uploaded. `ReplicasHandedIn`."""

    WORDS = "the collection of what other replicas hand in"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class ProbeMemory(Awaited):
    """See whether another process can still write to the image. `MemoryUnmapped` or `MemoryStillMapped`."""

    WORDS = "the probe of its memory"


@dataclass(frozen=True, slots=True)
class Digest(Awaited):
    """Make the digests of a file out of the image. `Digested`."""

    POOL = Pool.DIGEST
    SPAN = "digest"
    file: str

    def __str__(self) -> str:
        return f"the digests of {self.file}"


@dataclass(frozen=True, slots=True)
class Upload(Awaited):
    """Put a file into the object store, or have it copied from the version before. `Uploaded`, or `PerhapsUnchanged`."""

    POOL = Pool.UPLOAD
    SPAN = "upload"
    file: str

    def __str__(self) -> str:
        return f"the upload of {self.file}"


@dataclass(frozen=True, slots=True)
class UploadDigests(Awaited):
    """Put the block digests of a file into the object store. `DigestsUploaded`."""

    POOL = Pool.UPLOAD
    SPAN = "upload_digests"
    file: str

    def __str__(self) -> str:
        return f"the upload of the block digests of {self.file}"


@dataclass(frozen=True, slots=True)
class CompareSample(Awaited):
    """Compare a sample of what ranks sent with what lies in the image. `SampleCompared`; DataLoss if it differs."""

    WORDS = "the comparison of a sample"
    POOL = Pool.DIGEST
    SPAN = "compare"


@dataclass(frozen=True, slots=True)
class WriteManifestAndPublish(Awaited):
    """Write the manifest, and make the version part of history. `Published`."""

    WORDS = "its publication"
    POOL = Pool.PUBLISH
    SPAN = "publish"


@dataclass(frozen=True, slots=True)
class HandOver(Awaited):
    """Have another replica read all files out of the image, and go on with the version or the share of it. `HandedOver`."""

    POOL = Pool.HANDOVER
    SPAN = "hand_over"
    to: Home

    def __str__(self) -> str:
        return f"the handover to {self.to}"


@dataclass(frozen=True, slots=True)
class NameMissing(Awaited):
    """List what has not arrived, because nothing more is heard of the ranks. `TimedOut`."""

    WORDS = "the list of what is missing"
    POOL = Pool.PLAN


@dataclass(frozen=True, slots=True)
class RecallMemory(Effect):
    """Ask processes that have the image mapped for writing to unmap it."""

    WORDS = "the recall of lent memory"


@dataclass(frozen=True, slots=True)
class CloseStream(Effect):
    """Refuse further pieces of a rank: it is sealed."""

    rank: int

    def __str__(self) -> str:
        return f"the end of the stream of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Supersede(Effect):
    """Tell the sessions of older versions of the model that this one is visible."""

    WORDS = "the word to older versions"


@dataclass(frozen=True, slots=True)
class WantMemory(Effect):
    """Tell the sessions of older versions of the model that this one waits for memory."""

    WORDS = "the word to older versions that memory is short"


@dataclass(frozen=True, slots=True)
class Remember(Effect):
    """Keep the declarations for the next push of the model; None forgets those of before."""

    WORDS = "the note for the next push"

    known: KnownSet | None


@dataclass(frozen=True, slots=True)
class NotifyReplicas(Effect):
    """Tell other replicas at once how far this one is."""

    WORDS = "the notice to other replicas"


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """Something that ends, and may also be asked for when the push has ended."""


@dataclass(frozen=True, slots=True)
class CloseWriter(Release):
    """Take no more bytes. `error` is what those get who still push; None if all bytes are here."""

    WORDS = "the end of what is received"

    error: WeighbridgeError | None


@dataclass(frozen=True, slots=True)
class ReleaseImage(Release):
    """Give the image back, as soon as nobody reads it."""

    WORDS = "the release of its memory"


@dataclass(frozen=True, slots=True)
class GiveUp(Release):
    """Close the version in head.json and delete what there is of it.

    Attributes:
        error: why.
        unless_claimed: whether it stays open if other replicas have claimed it: `LeftToOthers`.
        aborted: whether somebody asked for it.
    """

    WORDS = "its removal from head.json and the store"
    POOL = Pool.CLEAN

    error: WeighbridgeError
    unless_claimed: bool
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Forget(Release):
    """Drop the version from what this process lists: other replicas receive it."""

    WORDS = "its removal from what is listed"
