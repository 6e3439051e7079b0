"""Effects of a push: actions that the session carries out for the state machine.

Exactly one event answers an awaited effect, and the effect is not started again before that. `EffectFailed` can answer
any of them. A release frees a resource, and is not answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from weighbridge.errors import WeighbridgeError
from weighbridge_service.plan.declarations import Home, KnownSet


class Pool(StrEnum):
    """Thread pools, one for each kind of effect.

    Calls of the store have several, so that a call which hangs blocks only its own kind.
    """

    PLAN = "plan"
    IMAGE = "image"
    DIGEST = "digest"
    UPLOAD = "upload"
    READ = "read"
    """Reads of heads, and of messages from other replicas."""
    LEASE = "lease"
    CONFIRM = "confirm"
    """Confirmations that a version may become ready; ranks wait for them."""
    PUBLISH = "publish"
    """Manifests, and messages to other replicas."""
    CLEAN = "clean"
    """Deletions of versions that were given up."""
    HANDOVER = "handover"


@dataclass(frozen=True, slots=True)
class Effect:
    """Action that the state machine requests.

    Attributes:
        WORDS: its name in messages.
        POOL: pool of threads that runs it; None if it is fast and runs in the calling thread.
        SPAN: its name in traces; empty if traces do not show it, such as polls.
    """

    WORDS: ClassVar[str] = ""
    POOL: ClassVar[Pool | None] = None
    SPAN: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.WORDS


@dataclass(frozen=True, slots=True)
class Awaited(Effect):
    """Effect that an event answers."""


@dataclass(frozen=True, slots=True)
class MakePlan(Awaited):
    """Assign the shards to ranks and plan the copies, from the declarations of all ranks. `Planned`."""

    WORDS = "the plan of the push"
    POOL = Pool.PLAN
    SPAN = "plan"


@dataclass(frozen=True, slots=True)
class AcquireImage(Awaited):
    """Allocate memory for the files of this replica, and write their headers. `ImageGranted`."""

    WORDS = "the allocation of its image"
    POOL = Pool.IMAGE


@dataclass(frozen=True, slots=True)
class Claim(Awaited):
    """Record the agreement in head.json. Only replicas under this agreement may write the version's folder.

    `Claimed`.
    """

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
    """Read the state of the version from head.json. `HeadSaid`.

    Attributes:
        closing: whether to first close versions whose lease has expired.
    """

    WORDS = "the check of head.json"
    POOL = Pool.READ

    closing: bool = False


@dataclass(frozen=True, slots=True)
class Confirm(Awaited):
    """Read once more, when all bytes have arrived, whether the version is still open. `HeadSaid`."""

    WORDS = "the last check of head.json"
    POOL = Pool.CONFIRM
    SPAN = "confirm"


@dataclass(frozen=True, slots=True)
class FindOut(Awaited):
    """Check whether a publication took effect although its call failed. `HeadSaid`."""

    WORDS = "the check whether it was published"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class TellReplicas(Awaited):
    """Send the declarations of ranks at this replica to the other replicas. `ReplicasTold`."""

    WORDS = "the report of declared layouts to other replicas"
    POOL = Pool.PUBLISH


@dataclass(frozen=True, slots=True)
class HearReplicas(Awaited):
    """Read the declarations of ranks at other replicas. `HeardElsewhere`."""

    WORDS = "the read of layouts declared at other replicas"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class HandIn(Awaited):
    """Send the names and digests of the files that this replica has uploaded to the other replicas. `HandedIn`."""

    WORDS = "the report of its uploaded files"
    POOL = Pool.PUBLISH
    SPAN = "hand_in"


@dataclass(frozen=True, slots=True)
class CollectHandIns(Awaited):
    """Read which files other replicas have uploaded. `ReplicasHandedIn`."""

    WORDS = "the collection of reports from other replicas"
    POOL = Pool.READ


@dataclass(frozen=True, slots=True)
class ProbeMemory(Awaited):
    """Check whether another process can still write to the image. `MemoryUnmapped` or `MemoryStillMapped`."""

    WORDS = "the probe of its memory"


@dataclass(frozen=True, slots=True)
class Digest(Awaited):
    """Compute the digests of a file in the image. `Digested`."""

    POOL = Pool.DIGEST
    SPAN = "digest"
    file: str

    def __str__(self) -> str:
        return f"the digests of {self.file}"


@dataclass(frozen=True, slots=True)
class Upload(Awaited):
    """Put a file into the object store, or copy it there from the parent version. `Uploaded`, or `PerhapsUnchanged`."""

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
    """Compare a sample of the received pieces with the image. `SampleCompared`; DataLoss if they differ."""

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
    """Hand the version, or this replica's share of it, over to another replica, which reads all files from the image.

    `HandedOver`.
    """

    POOL = Pool.HANDOVER
    SPAN = "hand_over"
    to: Home

    def __str__(self) -> str:
        return f"the handover to {self.to}"


@dataclass(frozen=True, slots=True)
class NameMissing(Awaited):
    """List the ranks and shards that have not arrived, after the receive timeout. `TimedOut`."""

    WORDS = "the list of what is missing"
    POOL = Pool.PLAN


@dataclass(frozen=True, slots=True)
class RecallMemory(Effect):
    """Ask processes that have the image mapped for writing to unmap it."""

    WORDS = "the recall of granted memory"


@dataclass(frozen=True, slots=True)
class CloseStream(Effect):
    """Refuse further pieces of a rank, which is sealed."""

    rank: int

    def __str__(self) -> str:
        return f"the end of the stream of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Supersede(Effect):
    """Mark older versions of the model as superseded: this one is visible."""

    WORDS = "the notice to older versions"


@dataclass(frozen=True, slots=True)
class WantMemory(Effect):
    """Ask older versions of the model to release their memory, because this one waits for memory."""

    WORDS = "the notice to older versions that memory is short"


@dataclass(frozen=True, slots=True)
class Remember(Effect):
    """Keep the declarations for the next push of the model; None forgets earlier ones."""

    WORDS = "the record for the next push"

    known: KnownSet | None


@dataclass(frozen=True, slots=True)
class NotifyReplicas(Effect):
    """Report the progress of this replica to the other replicas at once."""

    WORDS = "the notice to other replicas"


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """Effect that frees a resource; the state machine may also request it after the push has ended."""


@dataclass(frozen=True, slots=True)
class CloseWriter(Release):
    """Accept no more bytes. Ranks that still push get `error`; None if all bytes have arrived."""

    WORDS = "the end of receiving"

    error: WeighbridgeError | None


@dataclass(frozen=True, slots=True)
class ReleaseImage(Release):
    """Release the image; its memory is free once no reader holds it."""

    WORDS = "the release of its memory"


@dataclass(frozen=True, slots=True)
class GiveUp(Release):
    """Close the version in head.json and delete its objects.

    Attributes:
        error: the reason.
        unless_claimed: whether the version stays open if other replicas have claimed it: `LeftToOthers`.
        aborted: whether a caller has aborted it.
    """

    WORDS = "its removal from head.json and the store"
    POOL = Pool.CLEAN

    error: WeighbridgeError
    unless_claimed: bool
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Forget(Release):
    """Remove the version from this process's lists, because other replicas receive it."""

    WORDS = "its removal from the list of versions"
