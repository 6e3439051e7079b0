"""Progress of one replica with its part of a version that several replicas receive together, and its wire format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from weighbridge.errors import InvalidArgument
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.plan.declarations import Home
from weighbridge_storage.versions.writing import Written

_ADDRESS = re.compile(r"[A-Za-z0-9._\[\]:%-]{1,300}:[0-9]{1,5}")


class Stage(IntEnum):
    """Stage of a replica. Each stage implies the earlier ones, except for the last two."""

    RECEIVING = pb.PUSH_STAGE_RECEIVING
    """Bytes of its files are still missing."""
    COMPLETE = pb.PUSH_STAGE_COMPLETE
    """All bytes have arrived and can no longer change."""
    WRITTEN = pb.PUSH_STAGE_WRITTEN
    """Its files are in the object store."""
    PUBLISHED = pb.PUSH_STAGE_PUBLISHED
    """The version is part of history."""
    FAILED = pb.PUSH_STAGE_FAILED
    """The version has failed."""
    ABORTED = pb.PUSH_STAGE_ABORTED
    """A caller has aborted the version."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one replica with its part of a version.

    Attributes:
        model: ``namespace/name``.
        number: number of the version.
        claim: claim of the agreement between the replicas.
        stage: stage of the part.
        share: number of the replica that the part was assigned to at first.
        handovers: number of handovers of the part between replicas.
        written: files that the replica has written; None if it has not written any, or if they are not included.
        error: reason why the version failed or was aborted.
        nonfinite: number of elements that are known to be NaN or infinite.
    """

    model: str
    number: int
    claim: str
    stage: Stage
    share: int
    handovers: int = 0
    written: Written | None = None
    error: str = ""
    nonfinite: int = 0

    @property
    def version(self) -> tuple[str, int, str]:
        """Model and number of the version, and the claim of its agreement."""
        return self.model, self.number, self.claim

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Key of the part: the key of its version, and the number of the share."""
        return *self.version, self.share


@dataclass(frozen=True, slots=True)
class SharedPush:
    """A version that this replica receives together with others.

    Attributes:
        progress: progress of this replica.
        peers: the other replicas.
    """

    progress: Progress
    peers: tuple[Home, ...]


def home_to_proto(home: Home) -> pb.Replica:
    """Encode a process of the service as a message."""
    return pb.Replica(address=home.address, boot=home.boot)


def home_from_proto(message: pb.Replica) -> Home:
    """Decode a process of the service from a message.

    Raises:
        InvalidArgument: its address is malformed.
    """
    if not _ADDRESS.fullmatch(message.address):
        raise InvalidArgument(f"{message.address[:80]!r} is not the address of a replica", fix="write it as host:port")
    return Home(message.address, message.boot)


def progress_to_proto(progress: Progress, *, with_files: bool) -> pb.VersionProgress:
    """Encode progress as a message; ``with_files`` includes the written files."""
    written = progress.written if with_files else None
    return pb.VersionProgress(
        model=progress.model,
        number=progress.number,
        claim=progress.claim,
        stage=pb.PushStage.ValueType(progress.stage),
        share=progress.share,
        handovers=progress.handovers,
        written=b"" if written is None else written.to_json(progress.claim),
        error=progress.error,
        nonfinite_elements=progress.nonfinite,
    )


def progress_from_proto(message: pb.VersionProgress) -> Progress | None:
    """Decode progress from a message; None if this release does not know its stage.

    Raises:
        DataLoss: its list of written files is malformed.
    """
    try:
        stage = Stage(message.stage)
    except ValueError:
        return None
    written: Written | None = None
    if message.written:
        claim, written = Written.from_json(message.written, f"progress of {message.model}@{message.number}")
        if claim != message.claim:
            written = None
    return Progress(
        *(message.model, message.number, message.claim, stage),
        *(message.share, message.handovers, written, message.error),
        nonfinite=message.nonfinite_elements,
    )
