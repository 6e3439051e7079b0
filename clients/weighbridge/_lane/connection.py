"""Connection of a client to the service's Unix socket: requests, answers, and recalls of memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeAlias

from google.protobuf.message import DecodeError

from weighbridge._lane import protocol
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from weighbridge.v1 import local_lane_pb2 as pb

_ANSWER_SECONDS = 60.0
_HELLO_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group."""

Answer: TypeAlias = tuple[pb.LaneResponse, list[int]]


class LaneConnection:
    """One connection. Safe to use from several threads.

    Args:
        path: of the socket.
        own_user: whether the process that answers must be this user's.
        service_id: id of the service that must answer.
        client_id: id of this client, with which layouts are declared.
        ticket: the client's credential, which the service has issued.
        on_recall: is called with the key of memory that the service recalls.
        on_end: is called once, when the connection has ended, on either side.

    Raises:
        FailedPrecondition: the socket cannot be used; says why.
    """

    def __init__(
        self,
        path: str,
        own_user: bool,
        service_id: str,
        client_id: str,
        ticket: str,
        on_recall: Callable[[str], None],
        on_end: Callable[[LaneConnection], None],
    ) -> None:
        self._on_recall = on_recall
        self._on_end = on_end
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._next_id = 1
        self._ended = False
        self._readers = 0
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_HELLO_SECONDS)
            self._socket.connect(path)
            if own_user and _user_of(self._socket) != os.getuid():
                # any user of a machine that the service does not run on could have made it
                raise FailedPrecondition(f"the process that answers on the service's socket {path} is another user's")
            self._socket.settimeout(None)
            protocol.limit_sending(self._socket, _ANSWER_SECONDS)
        except OSError as error:
            self._socket.close()
            raise FailedPrecondition(
                f"the service's socket {path} cannot be reached from here: {error.strerror or error}",
                fix="containers must mount the folder of the socket at the same path: see --local-socket",
            ) from error
        except FailedPrecondition:
            self._socket.close()
            raise
        _open.add(self)
        self._reader = threading.Thread(target=self._read, name="local-lane", daemon=True)
        self._reader.start()
        # requests from destructors and callbacks: the garbage collector must not wait for the socket
        self._last_words: SimpleQueue[pb.LaneRequest | None] = SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="local-lane-ends", daemon=True)
        self._speaker.start()
        try:
            hello = pb.LaneRequest(hello=pb.LaneHello(client_id=client_id, ticket=ticket))
            found = self.ask(hello, seconds=_HELLO_SECONDS)[0].hello
            if found.service_id != service_id:
                raise FailedPrecondition(f"the socket {path} belongs to another service")
        except BaseException:
            self.close()
            raise

    def ask(self, request: pb.LaneRequest, *, seconds: float = _ANSWER_SECONDS) -> Answer:
        """Send a request, and wait for its answer. Returns it with its descriptors, which the caller closes.

        Raises:
            Unavailable: the connection has ended.
            DeadlineExceeded: there was no answer in time.
            WeighbridgeError: the error that the service has returned.
        """
        answer: Future[Answer] = Future()
        with self._lock:
            if self._ended:
                raise Unavailable("the connection to the service's socket has ended")
            request.id = self._next_id
            self._next_id += 1
            self._waiting[request.id] = answer
        try:
            with self._sending:
                protocol.send(self._socket, request)
        except OSError:
            self.close()  # the reading thread then fails all requests that wait, with Unavailable
        try:
            response, descriptors = answer.result(seconds)
        except TimeoutError as error:
            self.close()  # no caller would close the descriptors of an answer that came later
            raise DeadlineExceeded(f"the service's socket has not answered within {seconds:g} s") from error
        if response.HasField("error"):
            protocol.close_all(descriptors)
            raise protocol.error_from_proto(response.error)
        return response, descriptors

    def tell(self, request: pb.LaneRequest | None) -> None:
        """Send a request soon, in another thread, without waiting for its answer.

        With None, close the connection once no read is in progress.

        May be called from anywhere, destructors included.
        """
        self._last_words.put(request)

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._ended

    def reading(self) -> None:
        """Count one more read that is in progress, until its ``end_read`` is sent."""
        with self._lock:
            self._readers += 1

    def not_reading(self) -> None:
        """Undo `reading` for a read that did not begin."""
        with self._lock:
            self._readers -= 1

    def close_when_read(self) -> None:
        """End the connection once no granted memory is being read any more."""
        self.tell(None)

    def leave(self) -> None:
        """Close this process's end of a connection that belongs to the process it was forked from."""
        self._ended = True
        self._socket.close()

    def close(self) -> None:
        """End the connection, which releases all grants."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while (received := protocol.receive(self._socket)) is not None:
                raw, descriptors = received
                try:
                    response = pb.LaneResponse.FromString(raw)
                except DecodeError:
                    protocol.close_all(descriptors)
                    raise
                if response.HasField("recall"):
                    self._on_recall(response.recall.key)
                with self._lock:
                    answer = self._waiting.pop(response.id, None)
                if answer is None:
                    protocol.close_all(descriptors)
                else:
                    answer.set_result((response, descriptors))
        except (OSError, DecodeError, Unavailable):
            pass  # the connection has ended; `_end` fails all requests that wait
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self._last_words.put(None)
        self._socket.close()
        for answer in waiting:
            answer.set_exception(Unavailable("the connection to the service's socket has ended"))
        self._on_end(self)

    def _speak(self) -> None:
        while not self._ended:
            request = self._last_words.get()
            if request is None:
                self._closing = True
            else:
                self._send_unasked(request)
            if self._closing and not self._readers:
                self.close()
                return

    def _send_unasked(self, request: pb.LaneRequest) -> None:
        with self._lock:
            if request.HasField("end_read"):
                self._readers -= 1
            request.id = self._next_id
            self._next_id += 1
        with contextlib.suppress(OSError), self._sending:  # the reading thread sees its end
            protocol.send(self._socket, request)


def _user_of(connected: socket.socket) -> int:
    """The user of the process at the other end. Source: unix(7), SO_PEERCRED."""
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


_open: weakref.WeakSet[LaneConnection] = weakref.WeakSet()


def _leave_in_child() -> None:
    """A process that was forked must not keep its parent's connection alive."""
    for connection in list(_open):
        connection.leave()


os.register_at_fork(after_in_child=_leave_in_child)
