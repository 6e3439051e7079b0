"""File descriptors of a service: as many as the system lets it have, and shared out among its doors.

A door that took all of them would shut the others, and keep the service from its store. So each has a part, which is fixed, and the
rest is for objects, images and what replicas say to each other.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

log = logging.getLogger(__name__)

_MOST = 1 << 16
"""More are of no use."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """How many connections each door may have.

    Attributes:
        grpc: of clients and replicas, to each of the two ports.
        http: of people and programs.
        lane: to the Unix socket.
    """

    grpc: int
    http: int
    lane: int

    @staticmethod
    def of(limit: int) -> Descriptors:
        """The parts of a process that may have so many descriptors in all."""
        return Descriptors(grpc=max(limit // 16 * 3, 8), http=max(limit // 8, 8), lane=max(limit // 4, 8))


def raise_limit() -> int:
    """Let this process have as many descriptors as it may, and as are of use; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of %d file descriptors cannot be raised to %d: %s", soft, wanted, error)
        return soft
    return wanted
