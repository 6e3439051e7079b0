"""Unix socket of the local lane: limits on connections, and one thread for each client."""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.admission.rates import Rates
from weighbridge_service.api.lane.session import LaneSession
from weighbridge_service.api.lane.trust import Writers
from weighbridge_service.core import Core

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"
_BACKLOG = 128
_MOST_CLIENTS = 1024
_PENDING_BYTES = 128 << 20
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 10.0, 100.0
_TELL_SECONDS = 10.0
"""Seconds between two log lines about refused clients."""
_HELLO_SECONDS = 10.0
_STOP_SECONDS = 10.0
_ACCEPT_PAUSE = 0.5
_CREDENTIALS = struct.Struct("3i")  # struct ucred of <sys/socket.h>: process, user, group
_LONGEST_PATH = 107
"""Bytes of a Unix socket's path; Linux's limit."""


class LaneServer:
    """Server of the local lane, which runs until `stop`.

    Args:
        service: the service that grants its memory.
        where: path of the socket; ``auto`` for a socket in a folder that only this user can enter; ``off`` for no
            socket.
        most: maximum number of concurrent clients.
        hello_seconds: timeout for a client's hello after it has connected.
        stop_seconds: seconds that `stop` waits for clients that are being served.
        refusals_a_second: rate of refusals to the processes of one user. Further refusals are delayed, because each
            adds a line to the audit log.
        refusals_at_once: burst of refusals; needed because each rank of a job that may not write sends one request.

    Raises:
        InvalidArgument: the path is too long, or is not a socket, or a user cannot be trusted.
        Unavailable: the socket cannot be created, or another process listens on it.

    Attributes:
        service_id: identifies this process of the service.
        path: path of the socket; empty if there is none.
        unavailable: reason why there is no socket; empty if there is one.
        private: whether only processes of this user can reach the socket.
    """

    def __init__(
        self,
        service: Core,
        where: str,
        most: int,
        *,
        hello_seconds: float = _HELLO_SECONDS,
        stop_seconds: float = _STOP_SECONDS,
        refusals_a_second: float = _REFUSALS_A_SECOND,
        refusals_at_once: float = _REFUSALS_AT_ONCE,
    ) -> None:
        self._service = service
        self._hello_seconds = hello_seconds
        self._stop_seconds = stop_seconds
        self.service_id = uuid.uuid4().hex
        self.path = ""
        self.unavailable = ""
        self.private = where == AUTO
        self._lock = threading.Lock()
        self._sessions: dict[LaneSession, threading.Thread] = {}
        self._socket: socket.socket | None = None
        self._stopping = False
        self._places = HostQuota("places on the local lane", min(most, _MOST_CLIENTS))
        self._refusals = Rates(refusals_a_second, refusals_at_once)
        self._sent_away, self._told = 0, -_TELL_SECONDS
        self._writers = Writers.of(service.config.lane_trust_uids)
        self._pending = HostQuota("bytes of incomplete messages on the local lane", _PENDING_BYTES)
        if where == OFF:
            self.unavailable = "the service was started with --local-socket off"
            return
        try:
            # the folder of a given path decides who may use the socket, because containers run as different users
            path, mode = (_own_path(self.service_id), 0o600) if where == AUTO else (Path(where), 0o666)
            self._socket = _listen(path, mode)
        except (Unavailable, InvalidArgument) as error:
            if where != AUTO:
                raise
            self.unavailable = error.message
            log.warning("%s; trainers and engines on this machine use gRPC", error.message)
            return
        self.path = str(path.absolute())
        self._accepting = threading.Thread(target=self._accept, args=(self._socket,), name="local-lane", daemon=True)
        self._accepting.start()

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        with self._lock:
            return len(self._sessions)

    def stop(self) -> None:
        """Close all connections, which ends their loans."""
        if self._socket is None:
            return
        self._stopping = True
        Path(self.path).unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._socket.close()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.close()
        # an unavailable store may block a thread that completes a version
        deadline = time.monotonic() + self._stop_seconds
        for thread in sessions.values():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.warning("a client could not connect to %s: %s", self.path, error)
                time.sleep(_ACCEPT_PAUSE)
                continue
            uid = _uid(connection)
            user = f"uid {uid}"
            if not self._places.try_take(user):
                connection.close()
                self._tell_of_refusal(user)
                continue
            session = LaneSession(
                self._service,
                connection,
                self.service_id,
                _RoomOf(self._pending, user),
                uid,
                partial(self._writers.check, uid),
                partial(self._refusals.delay, user),
                self._hello_seconds,
            )
            thread = threading.Thread(target=self._run, args=(session, user), name="local-lane-client", daemon=True)
            with self._lock:
                self._sessions[session] = thread
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("a client of %s cannot be served: %s", self.path, error)
                with self._lock:
                    del self._sessions[session]
                connection.close()
                self._places.give(user)

    def _tell_of_refusal(self, user: str) -> None:
        self._sent_away += 1
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            log.warning("%s; clients refused: %d", self._places.refusal(user).message, self._sent_away)
            self._sent_away, self._told = 0, now

    def _run(self, session: LaneSession, user: str) -> None:
        self._service.mappings.add(session)
        try:
            session.run()
        finally:
            self._service.mappings.remove(session)
            with self._lock:
                del self._sessions[session]
            self._places.give(user)


@dataclass(frozen=True, slots=True)
class _RoomOf:
    """A user's share of the capacity for incomplete messages; see `weighbridge._lane.protocol.Room`."""

    quota: HostQuota
    user: str

    def take(self, nbytes: int) -> None:
        self.quota.take(self.user, nbytes)

    def give(self, nbytes: int) -> None:
        if nbytes:
            self.quota.give(self.user, nbytes)


def _uid(connection: socket.socket) -> int:
    """User id of the process at the other end, from the kernel. All processes of one user count as one peer."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def _own_path(service_id: str) -> Path:
    """Path of a socket in a folder that only this user can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"weighbridge-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise Unavailable(f"the folder {folder} for the local lane cannot be created: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Unavailable(f"the folder {folder} for the local lane does not belong to this user alone")
    for old in folder.glob("*.sock"):  # left by killed processes
        if not _is_served(old):
            old.unlink(missing_ok=True)
    return folder / f"{service_id}.sock"


def _listen(path: Path, mode: int) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidArgument(
            f"the socket's path {path} is longer than {_LONGEST_PATH} bytes", fix="name a shorter one"
        )
    if path.exists() and not path.is_socket():
        raise InvalidArgument(f"{path} exists and is not a socket", fix="name a different --local-socket")
    if path.exists():
        if _is_served(path):
            raise Unavailable(
                f"another process listens on {path}",
                fix="is another service running? name a different --local-socket",
            )
        path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # renamed only when it listens: before, other services would take it for a socket that a killed process left
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        listening.bind(str(unnamed))
        unnamed.chmod(mode)
        listening.listen(_BACKLOG)
        unnamed.rename(path)
    except OSError as error:
        listening.close()
        raise Unavailable(f"the socket {path} cannot be created: {error.strerror}") from error
    return listening


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
        return True
