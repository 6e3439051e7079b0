"""Local lane of a client on the service's machine: shards are written, and slices read, where the version lies.

The service grants access to memory; see ``weighbridge/v1/local_lane.proto``. A grant ends with its loan, or with this
process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from weighbridge._core.layouts import Layout
from weighbridge._core.slices import LayoutRequest
from weighbridge._lane import protocol
from weighbridge._lane.arrival_marks import ArrivalMarks
from weighbridge._lane.connection import LaneConnection
from weighbridge._lane.loans import Granted, GrantedMemory, ReadLoan, WriteLoan
from weighbridge._lane.plans import LanePlans
from weighbridge._lane.stored_files import StoredFile, StoredTensor
from weighbridge._memory.mappings import MappedMemory, Use, merged
from weighbridge._transport import wire
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.v1 import local_lane_pb2 as pb

T = TypeVar("T")

log = logging.getLogger(__name__)

LANE_VARIABLE = "WEIGHBRIDGE_LANE"
SOCKET_VARIABLE = "WEIGHBRIDGE_LOCAL_SOCKET"
AUTO, GRPC, LOCAL = "auto", "grpc", "local"
MIXED = "mixed"
"""Lane that a push reports if parts of it went by each lane; clients cannot ask for it."""
_TRY_AGAIN_SECONDS = 30.0
"""Time until a lane that could not be used is tried again."""


def lane_wanted(lane: str | None) -> str:
    """The requested lane: as given, from ``WEIGHBRIDGE_LANE``, or ``auto``.

    Raises:
        InvalidArgument: there is no such lane.
    """
    wanted = lane or os.environ.get(LANE_VARIABLE) or AUTO
    if wanted not in (AUTO, GRPC, LOCAL):
        raise InvalidArgument(f"there is no lane {wanted[:40]!r}", fix=f"use {AUTO}, {GRPC} or {LOCAL}")
    return wanted


class _Kept:
    """Memory that was granted for reading, and may be used again for later versions.

    Args:
        descriptor: closed with this object.
        mapping: stays mapped until the last copy from it has ended.
    """

    def __init__(self, descriptor: int, mapping: MappedMemory) -> None:
        self.descriptor = descriptor
        self.mapping = mapping
        weakref.finalize(self, os.close, descriptor)


class LocalLane:
    """Local lane of one client. Connects when first used; safe to use from several threads.

    Args:
        wanted: ``auto``, ``grpc`` or ``local``.
        client_id: the one that layouts are declared with.
        find: asks the service where its socket is.
    """

    def __init__(self, wanted: str, client_id: str, find: Callable[[], pb.GetLocalLaneResponse]) -> None:
        self._wanted = wanted
        self._client_id = client_id
        self._find = find
        self._lock = threading.RLock()
        self._recalls = 0
        self._connection: LaneConnection | None = None
        self._closed = False
        self._refused: tuple[float, type[WeighbridgeError], str, str] | None = None
        self._writable: dict[str, MappedMemory] = {}
        self._kept: dict[str, _Kept] = {}
        self._plans = LanePlans()
        _lanes.add(self)

    @property
    def wanted(self) -> bool:
        """Whether the lane is to be tried."""
        return self._wanted != GRPC

    def refused(self, error: WeighbridgeError, what: str) -> str:
        """Record that the lane cannot be used for something. Returns the reason.

        Raises:
            WeighbridgeError: no other lane may be used, or the version itself has failed.
        """
        if self._wanted == LOCAL or isinstance(error, VersionFailed):
            raise error
        log.info("%s uses gRPC: %s", what, error.message)
        return error.message

    def write(self, model: str, number: int, rank: int, stream: Layout) -> WriteLoan:
        """Obtain a grant of the memory in which a version's files are assembled, to write a rank's stream to it, or the
        parts that belong there.

        Memory that was mapped for an earlier version stays mapped until the service recalls it.

        Raises:
            WeighbridgeError: no grant; says why.
        """
        connection = self._connected()
        plan_id, plan = self._plans.known((model, rank))
        with self._lock:
            held, recalls = dict(self._writable), self._recalls
        begin = pb.BeginWrite(model=model, number=number, rank=rank, plan_id=plan_id, held=[*held])
        answer, descriptors = connection.ask(pb.LaneRequest(begin_write=begin))
        loan = answer.write
        try:
            memory = None if descriptors else held.get(loan.memory.key)
            if memory is None:
                memory = _map(descriptors, loan.memory, Use.WRITE)
            placed = self._plans.placed(loan, plan, [memory.nbytes], stream, (model, rank))
            if descriptors:
                memory.populate(merged((c.file_offset, c.file_end) for shard in placed.copies for c in shard))
                self._keep(connection, self._writable, memory.key, memory, recalls)
            return WriteLoan(connection, loan.loan, memory, placed, stream)
        except BaseException:
            connection.tell(pb.LaneRequest(end_write=pb.EndWrite(loan=loan.loan, kept=True)))
            raise
        finally:
            protocol.close_all(descriptors)

    def read(
        self, model: str, version: int, request: LayoutRequest, layout: Layout, *, arriving: bool = False
    ) -> ReadLoan:
        """Obtain a grant of a version, to read slices of it where they lie.

        Args:
            model: ``namespace/name``.
            version: its number.
            request: names the slices.
            layout: of the slices.
            arriving: whether the version is still being received; `ReadLoan.arrivals` says then which slices may be
                read.

        Raises:
            WeighbridgeError: no grant; says why.
        """
        connection = self._connected()
        asked = wire.request_to_proto(request)
        what = (model, asked.SerializeToString())
        plan_id, plan = self._plans.known(what)
        with self._lock:
            held, recalls = dict(self._kept), self._recalls
        begin = pb.BeginRead(
            model=model, version=str(version), layout=asked, plan_id=plan_id, held=[*held], arriving=arriving
        )
        connection.reading()
        try:
            answer, descriptors = connection.ask(pb.LaneRequest(begin_read=begin))
        except BaseException:
            connection.not_reading()
            raise
        loan = answer.read
        forks = _forks.count

        def end() -> None:
            left_open = _forks.count != forks
            connection.tell(pb.LaneRequest(end_read=pb.EndRead(loan=loan.loan, left_open=left_open)))

        try:
            granted: list[Granted] = []
            sent = list(descriptors)
            for number, memory in enumerate(loan.memories):
                each = [sent.pop(0)] if sent and memory.descriptor_sent else []
                if not memory.keep:
                    granted.append(_stored(each, memory.bytes, loan, number))
                    continue
                kept = held.get(memory.key)
                if not each and kept is not None:
                    each = [kept.descriptor]
                private = _map(each, memory, Use.VIEW)
                if kept is None:
                    kept = _Kept(_duplicate(each[0]), _map(each, memory, Use.READ))
                    self._keep(connection, self._kept, memory.key, kept, recalls)
                granted.append(GrantedMemory(private, kept.mapping))
            arrivals = _arrivals(sent, loan.arrivals, layout, connection) if arriving else None
            placed = self._plans.placed(loan, plan, [memory.bytes for memory in loan.memories], layout, what)
            return ReadLoan(layout, placed.copies, granted, end, arrivals)
        except BaseException:
            end()
            raise
        finally:
            protocol.close_all(descriptors)

    def close(self) -> None:
        """Release everything except versions that tensors are views of, and connect no more."""
        with self._lock:
            self._closed = True
            connection = self._connection
        if connection is not None:
            self._lost(connection)
            connection.close_when_read()

    def leave(self) -> None:
        """Release what was kept for later pulls, in a process that was forked and will make none."""
        kept, self._kept = self._kept, {}
        for each in kept.values():
            each.mapping.abandon()

    def _keep(self, connection: LaneConnection, books: dict[str, T], key: str, memory: T, recalls: int) -> None:
        """Keep memory for later, unless the service has recalled some since, or is gone."""
        with self._lock:
            there = connection is self._connection and not connection.ended and not self._closed
            if there and self._recalls == recalls:
                books.setdefault(key, memory)  # another thread may have mapped it meanwhile

    def _connected(self) -> LaneConnection:
        with self._lock:
            if self._closed:
                raise Unavailable("the client has been closed")
            if self._connection is not None and not self._connection.ended:
                return self._connection
            if self._refused is not None and time.monotonic() < self._refused[0]:
                _, kind, message, fix = self._refused
                raise kind(message, fix=fix)
            if self._connection is not None:
                self._lost(self._connection)
            try:
                self._connection = self._connect()
            except WeighbridgeError as error:
                if isinstance(error, Unavailable | DeadlineExceeded):
                    raise  # the service may be there in a moment
                # not the error itself: it holds on to the frames it went through, and so to tensors
                until = time.monotonic() + _TRY_AGAIN_SECONDS
                self._refused = (until, type(error), error.message, error.fix)
                raise
            self._refused = None
            return self._connection

    def _connect(self) -> LaneConnection:
        try:
            found = self._find()
        except (Unavailable, DeadlineExceeded):
            raise
        except WeighbridgeError as error:
            raise FailedPrecondition(f"the service does not report the path of its socket: {error.message}") from error
        named = os.environ.get(SOCKET_VARIABLE, "")
        path = named or found.socket
        if not path:
            raise FailedPrecondition(f"the service has no local socket: {found.unavailable}")
        return LaneConnection(
            path,
            found.private and not named,
            found.service_id,
            self._client_id,
            found.ticket,
            self._recalled,
            self._lost,
        )

    def _recalled(self, key: str) -> None:
        with self._lock:
            self._recalls += 1
            gone = self._writable.pop(key, None), self._kept.pop(key, None)
        del gone  # a mapping is released with the last tensor that is being copied to or from it

    def _lost(self, connection: LaneConnection) -> None:
        """Forget the memory that came by a connection."""
        with self._lock:
            if connection is not self._connection:
                return
            gone = self._writable, self._kept
            self._writable, self._kept = {}, {}
        del gone


def _map(descriptors: Sequence[int], memory: pb.SharedMemory, use: Use) -> MappedMemory:
    """Map memory by the first of the descriptors."""
    if not descriptors:
        raise DataLoss("the service granted memory without its descriptor")
    try:
        size = os.fstat(descriptors[0]).st_size
    except OSError as error:
        raise DataLoss(f"the descriptor of granted memory cannot be used: {error}") from error
    if size < memory.bytes:
        raise DataLoss("the service granted memory that is shorter than it reported")
    return MappedMemory(descriptors[0], memory.key, memory.bytes, use)


def _arrivals(
    descriptors: Sequence[int], said: pb.Arrivals, layout: Layout, connection: LaneConnection
) -> ArrivalMarks:
    """The marks of a version that is being received, by the first of the descriptors."""
    if said.layout_digest != layout.digest or len(said.marks) != len(layout.placements):
        raise FailedPrecondition(
            "the version has different tensors than the previous one, and can be read only when it is ready"
        )
    memory = _map(descriptors, said.memory, Use.READ)
    if max(said.marks, default=0) >= memory.nbytes:
        raise DataLoss("the service reports a mark in memory that it has not granted")
    return ArrivalMarks(memory, np.array(said.marks, np.int64), said.tensors_digest, connection)


def _stored(descriptors: Sequence[int], nbytes: int, loan: pb.ReadLoan, number: int) -> StoredFile:
    """A granted file, to be read by the first of the descriptors."""
    if not descriptors:
        raise DataLoss("the service granted a file without its descriptor")
    files = [file for file in loan.files if file.memory == number]
    tensors = {
        file.offset + part.offset: StoredTensor(part.bytes, part.xxh3_128) for file in files for part in file.tensors
    }
    title = f"{loan.version.model}@{loan.version.number}"
    return StoredFile(descriptors[0], nbytes, title, ", ".join(file.name for file in files), tensors)


def _duplicate(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        raise ResourceExhausted(f"no file descriptor is left: {error}") from error


class _Forks:
    """Number of times that this process was forked: children inherit all that it has mapped."""

    def __init__(self) -> None:
        self.count = 0

    def take_note(self) -> None:
        self.count += 1


_forks = _Forks()
_lanes: weakref.WeakSet[LocalLane] = weakref.WeakSet()


def _leave_in_child() -> None:
    for lane in list(_lanes):
        lane.leave()


os.register_at_fork(before=_forks.take_note, after_in_child=_leave_in_child)
