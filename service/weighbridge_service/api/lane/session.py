"""Session of one client of the local lane, with its loans of memory. All loans end when the client disconnects."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property

from google.protobuf.message import DecodeError

from weighbridge._core.layouts import STREAM
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.range_set import RangeSet
from weighbridge._lane import protocol
from weighbridge._transport import wire
from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.v1 import local_lane_pb2 as pb
from weighbridge_service.access.identities import PresentedCredentials
from weighbridge_service.access.peer import LOCAL, Peer, authorize
from weighbridge_service.admission.reader_shares import GrantedImages
from weighbridge_service.api.lane.peer_process import PeerProcess
from weighbridge_service.api.lane.plans import fill_plan
from weighbridge_service.catalog.head_versions import number_in
from weighbridge_service.core import Core
from weighbridge_service.pull.serving import GrantedVersion
from weighbridge_service.push.filling.image_writer import MemoryGrant
from weighbridge_storage.memory.file_bytes import Place
from weighbridge_storage.memory.images import Image
from weighbridge_storage.memory.regions import Region, why_not_granted

log = logging.getLogger(__name__)

_VERBS = {
    "begin_write": Verb.PUSH,
    "begin_read": Verb.PULL,
}
_MESSAGE_SECONDS = 10.0
"""Timeout for receiving a request, from its beginning to its end."""
_SEND_SECONDS = 30.0
"""Timeout for sending a response to a client that stops reading."""
_MOST_LOANS = 1024
"""Maximum number of concurrent loans of one client, so that a client that does not end them cannot fill the service's
memory with records.
"""


class LaneSession:
    """Serves one client until its connection ends.

    `run` is for one thread; all other methods may be called from any thread.

    Args:
        service: the service that grants its memory.
        connection: the client's connection. The session closes it at the end.
        service_id: identifies this process of the service.
        room: capacity for long incoming messages.
        user: user id of the client's process.
        check_writer: raises FailedPrecondition if the client may not write to granted memory.
        put_off: counts a refusal, and returns the seconds by which to delay it.
        hello_seconds: timeout for the client's hello.

    Attributes:
        client_id: the client's id, from its hello; empty before.
    """

    def __init__(
        self,
        service: Core,
        connection: socket.socket,
        service_id: str,
        room: protocol.Room,
        user: int,
        check_writer: Callable[[], None],
        put_off: Callable[[], float],
        hello_seconds: float,
    ) -> None:
        self._service = service
        self._connection = connection
        self._service_id = service_id
        self._room = room
        self._user = user
        self._evidence = PresentedCredentials(user=user)
        self._check_writer = check_writer
        self._put_off = put_off
        self._hello_seconds = hello_seconds
        self.client_id = ""
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._recalls: deque[str] = deque()  # keys of memory that the client must still be asked to release
        self._loans: dict[int, MemoryGrant | GrantedVersion] = {}
        self._images: dict[GrantedVersion, GrantedImages] = {}
        self._next_loan = 1
        self._writable: set[str] = set()  # keys of regions that the client may keep mapped for writing
        self._readable: set[str] = set()  # keys of memory that it may keep mapped for reading

    def run(self) -> None:
        """Serve requests until the client disconnects; then end all its loans."""
        try:
            protocol.limit_sending(self._connection, _SEND_SECONDS)
            self._connection.settimeout(self._hello_seconds)
            # accept no descriptors: clients need not send any, and those of incomplete messages could exhaust the
            # service's limit
            while received := protocol.receive(self._connection, self._room, _MESSAGE_SECONDS, 0):
                self._connection.settimeout(None)
                self._answer(pb.LaneRequest.FromString(received[0]))
        except (OSError, DecodeError, WeighbridgeError) as error:
            log.debug("a client of the local lane is gone: %s", error)
        finally:
            self.close()
            self._take_all_back()

    def close(self) -> None:
        """Close the connection; the thread in `run` then ends all loans."""
        self._closed.set()
        with suppress(OSError):  # the client has disconnected
            self._connection.shutdown(socket.SHUT_RDWR)

    def recall(self, region: Region) -> None:
        """Ask the client to release a region, unless it is writing a version there. Does not block."""
        with self._lock:
            in_use = any(isinstance(loan, MemoryGrant) and loan.image.region is region for loan in self._loans.values())
            if in_use or not (region.key in self._writable or region.key in self._readable):
                return
            self._writable.discard(region.key)
            self._readable.discard(region.key)
            self._recalls.append(region.key)
        self._send_recalls()

    def _send_recalls(self) -> None:
        """Send the pending recalls. If another thread is sending, that thread sends them afterwards: callers of
        `recall` hold locks, and must not wait for a client."""
        while self._recalls and self._sending.acquire(blocking=False):
            try:
                while self._recalls:
                    recall = pb.LaneResponse(recall=pb.Recall(key=self._recalls.popleft()))
                    protocol.send_at_once(self._connection, recall)
            except OSError:
                self._recalls.clear()
                self.close()  # the client has disconnected, or does not read
            finally:
                self._sending.release()

    def _answer(self, request: pb.LaneRequest) -> None:
        response = pb.LaneResponse(id=request.id)
        descriptors: list[int] = []

        def attach(memory: pb.SharedMemory, reopen: Callable[[], int]) -> None:
            """Send a descriptor with the response."""
            descriptors.append(reopen())
            memory.descriptor_sent = True

        try:
            try:
                self._do(request, response, attach)
            except Exception as error:  # must not end the client's other loans
                protocol.close_all(descriptors)
                descriptors.clear()
                response = pb.LaneResponse(id=request.id, error=protocol.error_to_proto(_as_refusal(error)))
            with self._sending:
                protocol.send(self._connection, response, descriptors)
            self._send_recalls()
        finally:
            protocol.close_all(descriptors)

    def _do(self, request: pb.LaneRequest, response: pb.LaneResponse, attach: _Attach) -> None:
        kind = request.WhichOneof("request")
        if kind in _VERBS:
            asked = getattr(request, kind)
            ref = getattr(asked, "version", "") or getattr(asked, "number", "")
            try:
                self._authorize(kind, asked.model, str(ref))
                if _VERBS[kind] is Verb.PUSH:
                    self._check_writer()
            except WeighbridgeError:
                self._closed.wait(self._put_off())
                raise
        if kind == "hello":
            self._evidence = self._service.access.shown_by(request.hello.ticket, self._user)
            self.client_id = request.hello.client_id
            response.hello.service_id = self._service_id
        elif not self.client_id:
            raise InvalidArgument("the client has not identified itself", fix="send hello first, with a client_id")
        elif kind == "begin_write":
            self._begin_write(request.begin_write, response.write, attach)
        elif kind == "end_write":
            self._end_write(request.end_write)
        elif kind == "report_written":
            self._report_written(request.report_written)
        elif kind == "begin_read" and request.begin_read.arriving:
            self._begin_read_arriving(request.begin_read, response.read, attach)
        elif kind == "begin_read":
            self._begin_read(request.begin_read, response.read, attach)
        elif kind == "end_read":
            self._end_read(request.end_read)
        else:
            raise InvalidArgument("this service does not know this request of the local lane")

    def _authorize(self, action: str, model: str, ref: str) -> None:
        verb, result = _VERBS[action], "OK"
        peer = Peer(LOCAL, f"uid {self._user}", self._service.access.identify(self._evidence))
        try:
            authorize(peer, verb, model, ref)
            self._service.audit.check(verb)
        except WeighbridgeError as error:
            result = error.reason
            raise
        finally:
            self._service.audit.record(
                face="lane",
                host=str(peer),
                identity=peer.identity.name,
                action=action,
                verb=verb,
                model=model,
                ref=ref,
                result=result,
            )

    def _begin_write(self, asked: pb.BeginWrite, reply: pb.WriteLoan, attach: _Attach) -> None:
        grant = self._service.intake.grant_image(asked.model, asked.number, asked.rank, self.client_id)
        with self._undone_on_error(grant) as number:
            reply.loan = number
            self._grant_writable(grant.image, asked.held, reply, attach)
            stream, parts = grant.prepared.streams[asked.rank], grant.prepared.grantable[asked.rank]
            fill_plan(reply, asked.plan_id, grant.prepared.transfer, stream, str(asked.rank), parts)

    def _end_write(self, asked: pb.EndWrite) -> None:
        with self._lock:
            loan = self._loans.get(asked.loan)
            if not isinstance(loan, MemoryGrant):
                raise InvalidArgument(f"there is no grant {asked.loan} to end")
            del self._loans[asked.loan]
            if not asked.kept:
                self._writable.discard(loan.image.region.key)
        if not asked.kept:
            loan.image.region.doubt(self._process.ended)
        sample = [(piece.start, piece.end, piece.checksum) for piece in asked.sample]
        self._service.intake.end_grant(loan, complete=asked.complete, sample=sample)

    def _grant_writable(self, image: Image, held: Iterable[str], reply: pb.WriteLoan, attach: _Attach) -> None:
        region = image.region
        if not region.in_memory:
            raise FailedPrecondition("the version is assembled in a file on disk, which is not granted for writing")
        _check_lendable()
        reply.memory.key, reply.memory.bytes = region.key, region.capacity
        with self._lock:
            # the client may list a region as held although a recall of it is on its way
            if region.key not in held or region.key not in self._writable:
                attach(reply.memory, lambda: region.reopen(writable=True))
            self._writable.add(region.key)
        for name, offset in image.offsets.items():
            reply.files.add(name=name, memory=0, offset=offset)

    def _report_written(self, asked: pb.ReportWritten) -> None:
        with self._lock:
            loan = self._loans.get(asked.loan)
        if isinstance(loan, MemoryGrant):  # otherwise the loan ended while a report was on its way
            self._service.intake.report_written(loan, [(each.start, each.end) for each in asked.ranges])

    def _begin_read_arriving(self, asked: pb.BeginRead, reply: pb.ReadLoan, attach: _Attach) -> None:
        number = number_in(asked.version)
        if number is None:
            raise InvalidArgument("a version that is being received is read by its number")
        request = wire.request_from_proto(asked.layout)  # first: an error must not leave a hold on the image
        version, arriving = self._service.intake.arriving(asked.model, number)
        granted = self._service.serving.grant_arriving(version, arriving, request)
        with self._granting(granted, asked, reply, attach):
            memory = arriving.arrivals.region
            reply.arrivals.memory.key, reply.arrivals.memory.bytes = memory.key, memory.capacity
            attach(reply.arrivals.memory, lambda: memory.reopen(writable=False))
            reply.arrivals.marks.extend(arriving.arrivals.marks_of(granted.layout))
            reply.arrivals.layout_digest = granted.layout.digest
            reply.arrivals.tensors_digest = arriving.model.tensors_digest
            self._service.serving.count_granted(granted.layout.nbytes)

    def _begin_read(self, asked: pb.BeginRead, reply: pb.ReadLoan, attach: _Attach) -> None:
        granted = self._service.serving.grant(asked.model, asked.version, wire.request_from_proto(asked.layout))
        with self._granting(granted, asked, reply, attach):
            self._service.serving.count_granted(granted.layout.nbytes)

    @contextmanager
    def _granting(
        self, granted: GrantedVersion, asked: pb.BeginRead, reply: pb.ReadLoan, attach: _Attach
    ) -> Iterator[None]:
        """Grant slices in place for reading. Closes them if the grant or the block fails."""
        try:
            images = self._service.reader_shares.grant(self._reader, granted.places.values())
        except BaseException:
            granted.opened.close()
            raise
        with self._lock:
            self._images[granted] = images
        with self._undone_on_error(granted) as number:
            reply.loan = number
            reply.version.CopyFrom(wire.version_to_proto(granted.opened.version))
            whole = RangeSet([(0, granted.layout.nbytes)])
            fill_plan(reply, asked.plan_id, granted.transfer, granted.layout, STREAM, whole)
            self._grant_readable(granted.places, asked.held, reply, attach)
            yield

    def _grant_readable(
        self, places: Mapping[str, Place], held: Iterable[str], reply: pb.ReadLoan, attach: _Attach
    ) -> None:
        if any(place.lasting for place in places.values()):
            _check_lendable()
        numbers: dict[str, int] = {}
        for name, place in places.items():
            if place.key not in numbers:
                if len(numbers) == protocol.MAX_DESCRIPTORS:
                    raise FailedPrecondition(
                        f"the version is stored in more than {protocol.MAX_DESCRIPTORS} files on disk"
                    )
                numbers[place.key] = len(numbers)
                memory = reply.memories.add(key=place.key, bytes=place.nbytes, keep=place.lasting)
                with self._lock:
                    if place.key not in held or place.key not in self._readable:
                        attach(memory, place.open)
                    if place.lasting:
                        self._readable.add(place.key)
            file = reply.files.add(name=name, memory=numbers[place.key], offset=place.offset)
            for part in place.digests:
                file.tensors.add(offset=part.offset, bytes=part.nbytes, xxh3_128=bytes.fromhex(part.xxh3_128))

    def _end_read(self, asked: pb.EndRead) -> None:
        with self._lock:
            loan = self._loans.get(asked.loan)
            if not isinstance(loan, GrantedVersion):
                raise InvalidArgument(f"there is no grant {asked.loan} to end")
            del self._loans[asked.loan]
        self._end_reading(loan, left_open=asked.left_open)

    @contextmanager
    def _undone_on_error(self, loan: MemoryGrant | GrantedVersion) -> Iterator[int]:
        """Record a loan, and yield its number. Ends the loan if the block raises."""
        with self._lock:
            number = self._next_loan
            self._next_loan += 1
            self._loans[number] = loan
            count = len(self._loans)
        try:
            if count > _MOST_LOANS:
                raise InvalidArgument(
                    f"the client has {_MOST_LOANS} loans already",
                    fix="end those whose tensors are not needed",
                )
            yield number
        except BaseException:
            with self._lock:
                del self._loans[number]
            self._end(loan)
            raise

    def _end(self, loan: MemoryGrant | GrantedVersion) -> None:
        if isinstance(loan, MemoryGrant):
            self._service.intake.end_grant(loan, complete=False)
        else:
            self._end_reading(loan, left_open=False)

    def _end_reading(self, loan: GrantedVersion, *, left_open: bool) -> None:
        if left_open:
            loan.leave_open()
        loan.opened.close()
        with self._lock:
            images = self._images.pop(loan)
        self._service.reader_shares.end(images, left_open=left_open)

    @property
    def _reader(self) -> str:
        """The client, for messages: its identity, if known, and its user id."""
        name = self._service.access.identify(self._evidence).name
        return f"{name} (uid {self._user})" if name else f"uid {self._user}"

    def _take_all_back(self) -> None:
        with self._lock:
            loans, self._loans = list(self._loans.values()), {}
            self._writable.clear()
            self._readable.clear()
        for loan in loans:
            try:
                # the client's process may still run, and read the memory or write to it
                if isinstance(loan, GrantedVersion):
                    self._end_reading(loan, left_open=True)
                else:
                    loan.image.region.doubt(self._process.ended)
                    self._end(loan)
            except Exception:  # the other loans must end, too
                log.exception("a loan could not be ended")
        self._connection.close()

    @cached_property
    def _process(self) -> PeerProcess:
        return PeerProcess(self._connection)


_Attach = Callable[[pb.SharedMemory, Callable[[], int]], None]


def _check_lendable() -> None:
    why = why_not_granted()
    if why:
        raise FailedPrecondition(why)


def _as_refusal(error: Exception) -> WeighbridgeError:
    """The error that the client receives for an exception; an unexpected one is logged and replaced."""
    if isinstance(error, WeighbridgeError):
        return error
    if isinstance(error, OSError):
        return FailedPrecondition(f"memory could not be granted: {error}")
    log.error("a request of the local lane failed", exc_info=error)
    return WeighbridgeError(f"the service could not answer: {type(error).__name__}")
