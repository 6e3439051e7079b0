"""`ReplicaService`: requests from other replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from weighbridge._transport import pieces, rpc
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.admission.byte_budget import Direction
from weighbridge_service.api.grpc.bulk_streams import BulkStreams
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.replicas.heartbeat import SharedPushes
from weighbridge_service.replicas.progress import (
    home_from_proto,
    home_to_proto,
    progress_from_proto,
    progress_to_proto,
)
from weighbridge_service.replicas.takeovers import handed_from_proto
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.stores.objects import ByteArray


class OwnFiles(Protocol):
    """The files of versions that this replica holds in images."""

    def own_file(self, model: str, number: int, claim: str, file: str) -> tuple[ByteArray, ImageHold]:
        """All bytes of a file, and a hold that keeps them in memory until it is released.

        Raises:
            FailedPrecondition: the bytes are not final yet, or the push has failed or was aborted.
            NotFound: the version does not exist under this claim, or the image of the file no longer exists.
        """


class VersionTaker(Protocol):
    """Takes over versions from leaving replicas; see `handover.Takeovers`."""

    def take_over(self, sender: Home, version: HandedVersion, memory_wait: float, go_on: Callable[[], bool]) -> None:
        """Take over a version, or a share of it. Returns when all its bytes are here and this replica owns it."""


class ReplicaHandlers:
    """`ReplicaService`.

    Args:
        home: this process.
        pushes: the shared pushes, which provide this replica's progress and receive that of others.
        files: the files that other replicas may read.
        streams: admission of streams of weights.
        met: records a replica that has called.
        left: records a replica that is leaving.
        leaving: returns whether this process is leaving.
        takeovers: takes over versions.
        heard: records engines that have reported to another replica.
    """

    def __init__(
        self,
        home: Home,
        pushes: SharedPushes,
        files: OwnFiles,
        streams: BulkStreams,
        met: Callable[[Home], None],
        left: Callable[[Home], None],
        leaving: Callable[[], bool],
        takeovers: VersionTaker,
        heard: Callable[[Iterable[pb.ReportedEngine]], None],
    ) -> None:
        self._home = home
        self._met = met
        self._left = left
        self._leaving = leaving
        self._takeovers = takeovers
        self._heard = heard
        self._pushes = pushes
        self._files = files
        self._streams = streams

    def Exchange(self, request: pb.ExchangeRequest, call: Call) -> pb.ExchangeResponse:
        """See the contract."""
        try:
            told = [progress_from_proto(each) for each in request.versions]
        except DataLoss as error:
            raise InvalidArgument(error.message) from error
        sender = home_from_proto(request.sender)
        self._met(sender)
        self._heard(request.engines)
        for progress in told:
            if progress is not None:
                self._pushes.heard(sender, progress)
        asked = dict.fromkeys(progress.version for progress in told if progress is not None)
        if request.leaving:
            self._left(sender)
            asked |= dict.fromkeys(push.progress.version for push in self._pushes.shared() if sender in push.peers)
        return pb.ExchangeResponse(
            sender=home_to_proto(self._home),
            leaving=self._leaving(),
            versions=[
                progress_to_proto(each, with_files=False)
                for version in asked
                for each in self._pushes.progress(*version)
            ],
        )

    def TakeOver(self, request: pb.TakeOverRequest, call: Call) -> pb.TakeOverResponse:
        """See the contract."""
        self._takeovers.take_over(
            home_from_proto(request.sender),
            handed_from_proto(request),
            request.memory_wait_ms / 1000,
            call.is_active,
        )
        return pb.TakeOverResponse(owner=home_to_proto(self._home))

    def ReadFile(self, request: pb.ReadFileRequest, call: Call) -> Iterator[bytes]:
        """See the contract."""
        with self._streams.admit(Direction.REPLICAS, call) as share:
            data, hold = self._files.own_file(request.model, request.number, request.claim, request.file)
            with hold:
                end = request.offset + request.length
                if end > len(data):
                    raise InvalidArgument(
                        f"{request.file} of {request.model}@{request.number} has {len(data)} bytes; those up to {end} "
                        "were asked for"
                    )
                for start in range(request.offset, end, rpc.MESSAGE_BYTES):
                    stop = min(start + rpc.MESSAGE_BYTES, end)
                    share.take(stop - start)
                    part = data[start:stop].data
                    message = pb.ReadFileResponse(offset=start, checksum=rpc.checksum(part))
                    encoded = pieces.encode(message, part)
                    with share.with_client():
                        yield encoded
