"""Progress of one replica with its part of a version that several receive together, and the form on the wire of what replicas tell each other."""

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
    """How far a replica is; each stage implies those before it, but for the last two."""

    RECEIVING = pb.PUSH_STAGE_RECEIVING
    """Bytes of its files are still to come."""
    COMPLETE = pb.PUSH_STAGE_COMPLETE
    """All of them are there, and nobody can change them."""
    WRITTEN = pb.PUSH_STAGE_WRITTEN
    """They are in the object store."""
    PUBLISHED = pb.PUSH_STAGE_PUBLISHED
    """The version is part of history."""
    FAILED = pb.PUSH_STAGE_FAILED
    """The version was given up."""
    ABORTED = pb.PUSH_STAGE_ABORTED
    """It was given up because somebody asked for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one replica is with its part of a version.

    Attributes:
        model: ``namespace/name``.
        number: the version.
        claim: names what the replicas have agreed on.
        stage: how far.
        share: the number of the replica whose part it is.
        handovers: how often that part was handed over from replica to replica.
        written: the files that it has written; None if there are none, or they are not told.
        error: why the version was given up.
        nonfinite: how many elements that are NaN or infinite it knows of.
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
        """Which version, and under which agreement."""
        return self.model, self.number, self.claim

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Which part of which version."""
        return *self.version, self.share


@dataclass(frozen=True, slots=True)
class SharedPush:
    """A version that this replica receives together with others.

    Attributes:
        progress: how far it is here.
        peers: the other replicas.
    """

    progress: Progress
    peers: tuple[Home, ...]


def home_to_proto(home: Home) -> pb.Replica:
    """A process of the service as a message."""
    return pb.Replica(address=home.address, boot=home.boot)


def home_from_proto(message: pb.Replica) -> Home:
    """A message as the process of the service that it names.

    Raises:
        InvalidArgument: nothing can be reached at its address.
    """
    if not _ADDRESS.fullmatch(message.address):
        raise InvalidArgument(
            f"{message.address[:80]!r} is no address of a replica", fix="write it as host:port"
        )
    return Home(message.address, message.boot)


def progress_to_proto(progress: Progress, *, with_files: bool) -> pb.VersionProgress:
    """Progress as a message; with the files that were written, or without."""
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
    """A message as progress; None if it names a stage that this release does not know.

    Raises:
        DataLoss: the files it names cannot be read.
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
