"""The lane for processes of the service's own machine: shards are written, and slices read, where the version lies.

The service lends memory; see ``weighbridge/v1/local_lane.proto``. What was lent goes back when its loan is ended, or with this
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge import lane_protocol, wire
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.lane_connection import LaneConnection
from weighbridge.lane_memory import MappedMemory, Use, merged
from weighbridge.layouts import Layout
from weighbridge.push_sources import ShardSource
from weighbridge.resources import Version
from weighbridge.slices import LayoutRequest
from weighbridge.strided import StridedCopy, is_dense, placed_copies, read_tensor
from weighbridge.tensor_stream import check_size
from weighbridge.v1 import local_lane_pb2 as pb

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LANE_VARIABLE = "WEIGHBRIDGE_LANE"
SOCKET_VARIABLE = "WEIGHBRIDGE_LOCAL_SOCKET"
AUTO, GRPC, LOCAL = "auto", "grpc", "local"
_TRY_AGAIN_SECONDS = 30.0
"""How long a lane that could not be used is not asked for again."""
_KEPT_PLANS = 32


def lane_wanted(lane: str | None) -> str:
    """The lane that is asked for: as given, from ``WEIGHBRIDGE_LANE``, or ``auto``.

    Raises:
        InvalidArgument: there is no such lane.
    """
    wanted = lane or os.environ.get(LANE_VARIABLE) or AUTO
    if wanted not in (AUTO, GRPC, LOCAL):
        raise InvalidArgument(f"there is no lane {wanted[:40]!r}", fix=f"use {AUTO}, {GRPC} or {LOCAL}")
    return wanted


class WriteLoan:
    """Memory that a rank writes its stream to; made by `LocalLane.write`.

    Attributes:
        nbytes: length of the stream.
    """

    def __init__(
        self,
        connection: LaneConnection,
        number: int,
        memory: MappedMemory,
        copies: list[list[StridedCopy]],
        on_pinned: Callable[[], None],
    ) -> None:
        self._on_pinned = on_pinned
        self._connection = connection
        self._number = number
        self._memory: MappedMemory | None = memory
        self._copies = copies

    def fill(self, source: ShardSource) -> None:
        """Copy the shards to where they belong; afterwards they may change."""
        if self._memory is not None:
            source.write(self._copies, [self._memory])

    def end(self, *, complete: bool) -> None:
        """Let go of the memory.

        Args:
            complete: whether all of the stream was written.

        Raises:
            WeighbridgeError: the version has failed, or the service is gone.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            if memory.pinned:
                self._on_pinned()
            memory.close()
            request = pb.LaneRequest(end_write=pb.EndWrite(loan=self._number, complete=complete))
            self._connection.ask(request)


class ReadLoan:
    """A version that is read where it lies; made by `LocalLane.read`. It is held until all tensors made from it are gone, too.

    Attributes:
        version: which version.
    """

    def __init__(
        self,
        version: Version,
        layout: Layout,
        copies: list[list[StridedCopy]],
        private: Sequence[MappedMemory],
        kept: Sequence[MappedMemory],
        end: Callable[[], None],
    ) -> None:
        self.version = version
        self._layout = layout
        self._copies = copies
        self._memories = kept
        self._exported = [memory.exported() for memory in private]
        holder = _Holder()
        weakref.finalize(holder, end)
        for each in self._exported:
            each.holder = holder  # whatever keeps one of them keeps the loan

    def tensor(self, index: int) -> torch.Tensor:
        """A slice, by its index in the layout: a view of the version if it lies there in one run, a copy otherwise."""
        import torch

        shard = self._layout.placements[index].shard
        dtype = self._layout.tensors[shard.tensor].dtype.torch
        copies, nbytes = self._copies[index], self._layout.placements[index].nbytes
        if nbytes and is_dense(copies, nbytes) and copies[0].memory_offset % dtype.itemsize == 0:
            flat = torch.frombuffer(
                self._exported[copies[0].memory],
                dtype=dtype,
                count=nbytes // dtype.itemsize,
                offset=copies[0].memory_offset,
            )
            return flat.view(shard.box.extent)
        made = torch.empty(shard.box.extent, dtype=dtype)
        self.fill(index, made)
        return made

    def fill(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a slice, by its index in the layout, to a tensor on any device."""
        placement = self._layout.placements[index]
        check_size(placement, tensor)
        if placement.nbytes:
            read_tensor(tensor, self._copies[index], self._memories)


class _Holder:
    """Is there as long as something of a version is."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Memory that was lent for reading, and may be used again for later versions."""

    descriptor: int
    mapping: MappedMemory


class LocalLane:
    """What one client knows of the local lane. Connects when first used; safe to use from several threads.

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
        self._connection: LaneConnection | None = None
        self._closed = False
        self._refused: tuple[float, WeighbridgeError] | None = None
        self._standby: dict[str, MappedMemory] = {}
        self._kept: dict[str, _Kept] = {}
        self._plans: OrderedDict[str, pb.LanePlan] = OrderedDict()
        self._placed: OrderedDict[Any, list[list[StridedCopy]]] = OrderedDict()
        self._last_plan: dict[Any, str] = {}
        self._written: dict[str, list[tuple[int, int]]] = {}
        self._pin_ahead: set[str] = set()  # models whose shards lie on GPUs

    @property
    def wanted(self) -> bool:
        """Whether it is to be tried."""
        return self._wanted != GRPC

    def refused(self, error: WeighbridgeError, what: str) -> str:
        """Take note that the lane cannot be used for something; gives the reason.

        Raises:
            WeighbridgeError: no other lane may be used, or the version itself has failed.
        """
        if self._wanted == LOCAL or isinstance(error, VersionFailed):
            raise error
        log.info("%s goes by gRPC: %s", what, error.message)
        return error.message

    def write(self, model: str, number: int, rank: int, stream: Layout) -> WriteLoan:
        """Borrow the memory that a version's files are put together in, to write a rank's stream to it.

        Raises:
            WeighbridgeError: that cannot be done; says why.
        """
        connection = self._connected()
        with self._lock:
            known = self._last_plan.get((model, rank), "")
        asked = pb.BeginWrite(model=model, number=number, rank=rank, plan_id=known)
        answer, descriptors = connection.ask(pb.LaneRequest(begin_write=asked))
        loan = answer.write
        memory: MappedMemory | None = None
        try:
            with self._lock:
                memory = self._standby.pop(loan.memory.key, None)
            if descriptors:
                if memory is not None:
                    memory.close()
                memory = self._map(descriptors[0], loan.memory, Use.WRITE)
            elif memory is None:
                raise DataLoss("the service lent memory without its descriptor")
            copies = self._copies(loan, [memory.nbytes], stream, (model, rank))
            touched = merged((c.memory_offset, c.memory_end) for shard in copies for c in shard)
            self._written[model] = touched
            if descriptors:
                memory.populate(touched)
            return WriteLoan(connection, loan.loan, memory, copies, lambda: self._pin_ahead.add(model))
        except BaseException:
            if memory is not None:
                memory.close()
            connection.tell(pb.LaneRequest(end_write=pb.EndWrite(loan=loan.loan, complete=False)))
            raise
        finally:
            lane_protocol.close_all(descriptors)

    def prepare(self, model: str) -> bool:
        """Map what a model's next version will probably be written to; whether there was something.

        Raises:
            WeighbridgeError: that cannot be done; says why.
        """
        connection = self._connected()
        asked = pb.LaneRequest(prepare_write=pb.PrepareWrite(model=model))
        answer, descriptors = connection.ask(asked)
        try:
            lent = answer.write.memory
            if not descriptors:
                return lent.key in self._standby
            memory = self._map(descriptors[0], lent, Use.WRITE)
        finally:
            lane_protocol.close_all(descriptors)
        memory.populate(self._written.get(model, ()))
        if model in self._pin_ahead:
            with contextlib.suppress(WeighbridgeError):  # the push will try it again, and say why it fails
                memory.pin()
        with self._lock:
            if connection.ended:
                memory.close()
                return False
            before = self._standby.pop(lent.key, None)
            self._standby[lent.key] = memory
        if before is not None:
            before.close()
        return True

    def read(self, model: str, version: int, request: LayoutRequest, layout: Layout) -> ReadLoan:
        """Borrow a version, to read slices of it where they lie.

        Raises:
            WeighbridgeError: that cannot be done; says why.
        """
        connection = self._connected()
        asked = wire.request_to_proto(request)
        what = (model, asked.SerializeToString())
        with self._lock:
            known = self._last_plan.get(what, "")
        begin = pb.BeginRead(model=model, version=str(version), layout=asked, plan_id=known)
        answer, descriptors = connection.ask(pb.LaneRequest(begin_read=begin))
        loan = answer.read
        end = pb.LaneRequest(end_read=pb.EndRead(loan=loan.loan))
        try:
            private: list[MappedMemory] = []
            kept: list[MappedMemory] = []
            sent = iter(descriptors)
            with self._lock:
                for memory in loan.memories:
                    each = next(sent, -1) if memory.descriptor_sent else self._kept[memory.key].descriptor
                    private.append(self._map(each, memory, Use.VIEW))
                    if memory.keep and memory.key not in self._kept:
                        own = os.dup(each)
                        self._kept[memory.key] = _Kept(own, self._map(own, memory, Use.READ))
                    kept.append(self._kept[memory.key].mapping if memory.keep else private[-1])
                copies = self._copies(loan, [memory.nbytes for memory in private], layout, what)
            found = wire.version_from_proto(loan.version)
            return ReadLoan(found, layout, copies, private, kept, lambda: connection.tell(end))
        except BaseException as error:
            connection.tell(end)
            if isinstance(error, KeyError):
                raise DataLoss("the service lent memory without its descriptor") from error
            raise
        finally:
            lane_protocol.close_all(descriptors)

    def close(self) -> None:
        """Give everything back, and connect no more."""
        with self._lock:
            self._closed = True
            connection = self._connection
        if connection is not None:
            connection.close()

    def _connected(self) -> LaneConnection:
        with self._lock:
            if self._connection is not None and not self._connection.ended:
                return self._connection
            if self._closed:
                raise Unavailable("the client has been closed")
            if self._refused is not None and time.monotonic() < self._refused[0]:
                raise self._refused[1]
            try:
                self._connection = self._connect()
            except WeighbridgeError as error:
                self._refused = (time.monotonic() + _TRY_AGAIN_SECONDS, error)
                raise
            self._refused = None
            return self._connection

    def _connect(self) -> LaneConnection:
        try:
            found = self._find()
        except WeighbridgeError as error:
            raise FailedPrecondition(
                f"the service does not say where its socket is: {error.message}"
            ) from error
        path = os.environ.get(SOCKET_VARIABLE) or found.socket
        if not path:
            raise FailedPrecondition(f"the service has no local socket: {found.unavailable}")
        return LaneConnection(path, found.service_id, self._client_id, self._recalled, self._lost)

    def _recalled(self, key: str) -> None:
        with self._lock:
            standby, kept = self._standby.pop(key, None), self._kept.pop(key, None)
        if standby is not None:
            standby.close()
        if kept is not None:
            os.close(kept.descriptor)  # its mapping goes with the last tensor that is being copied from it

    def _lost(self) -> None:
        with self._lock:
            keys = {*self._standby, *self._kept}
        for key in keys:
            self._recalled(key)

    def _map(self, descriptor: int, memory: pb.SharedMemory, use: Use) -> MappedMemory:
        if os.fstat(descriptor).st_size < memory.bytes:
            raise DataLoss("the service lent memory that is shorter than it says")
        return MappedMemory(descriptor, memory.key, memory.bytes, use)

    def _copies(
        self, loan: pb.WriteLoan | pb.ReadLoan, sizes: list[int], stream: Layout, what: Any
    ) -> list[list[StridedCopy]]:
        """The copies of a loan; from earlier ones if nothing has changed."""
        places: Mapping[str, tuple[int, int]] = {file.name: (file.memory, file.offset) for file in loan.files}
        if any(number >= len(sizes) for number, _ in places.values()):
            raise DataLoss("the service says that a file lies in memory that it has not lent")
        key = (loan.plan_id, tuple(sorted(places.items())), tuple(sizes))
        with self._lock:
            if loan.HasField("plan"):
                self._plans[loan.plan_id] = loan.plan
                _bound(self._plans)
            self._last_plan[what] = loan.plan_id
            if key not in self._placed:
                if loan.plan_id not in self._plans:
                    del self._last_plan[what]
                    raise Unavailable("the service counts on a plan that is no longer known here")
                self._placed[key] = placed_copies(self._plans[loan.plan_id], stream, places, sizes)
                _bound(self._placed)
            return self._placed[key]


def _bound(cache: OrderedDict[Any, Any]) -> None:
    while len(cache) > _KEPT_PLANS:
        cache.popitem(last=False)
