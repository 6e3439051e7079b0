"""Process at the other end of a Unix socket, and whether it has ended."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import weakref

_PEER_PIDFD = 77
"""SO_PEERPIDFD of Linux 6.5; Python has no name for it yet."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred of <sys/socket.h>: process, user, group


class PeerProcess:
    """The process that opened a connection. It has ended when its pidfd (see pidfd_open(2)) is readable: then none of
    its threads run, and the kernel has removed its mappings and closed its devices.

    Args:
        connection: a connected Unix socket, whose other end may be closed already.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._ended = False
        self._descriptor: int | None = None
        try:
            self._descriptor = _pidfd(connection)
        except ProcessLookupError:
            self._ended = True
        except OSError:
            return  # unknown: callers find out by other means whether its memory is in use
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)

    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        if not self._ended and self._descriptor is not None:
            looking = select.poll()
            looking.register(self._descriptor, select.POLLIN)
            self._ended = bool(looking.poll(0))
        return self._ended


def _pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the process at the other end; None if this process cannot see it.

    Raises:
        ProcessLookupError: the process has ended.
        OSError: the kernel does not tell.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    # an older kernel. The process id may have been reused: then the pidfd is of the wrong process, and the memory
    # itself must be checked
    process = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    opened = getattr(os, "pidfd_open", None)  # Python may have been built where there was none
    return opened(process) if opened is not None and process > 0 else None  # 0: of another namespace
