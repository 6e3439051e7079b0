"""File descriptors of a service: as many as the system allows, divided between its ports.

Connections to one port must not use all descriptors, or the other ports and the store would be unreachable. So each
port has a fixed share; the rest is for objects, images and connections between replicas.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

log = logging.getLogger(__name__)

_MOST = 1 << 16
"""Maximum number of descriptors that a service uses."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Maximum number of connections by port.

    Attributes:
        grpc: connections of clients and replicas, to each of the two gRPC ports.
        http: connections to the HTTP port.
        lane: connections to the Unix socket.
    """

    grpc: int
    http: int
    lane: int

    @staticmethod
    def of(limit: int) -> Descriptors:
        """The shares of a process that may have ``limit`` descriptors in total."""
        return Descriptors(grpc=max(limit // 16 * 3, 8), http=max(limit // 8, 8), lane=max(limit // 4, 8))


def raise_limit() -> int:
    """Raise this process's limit of descriptors as far as allowed, but not above `_MOST`. Returns the limit to use."""
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
