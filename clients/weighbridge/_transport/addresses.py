"""Addresses of a service's replicas, and which of them is in use."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence

from weighbridge.errors import InvalidArgument, Unavailable

_PORT = 50051
DEFAULT_SERVER = f"127.0.0.1:{_PORT}"
SERVER_VARIABLE = "WEIGHBRIDGE_SERVER"


class Addresses:
    """The addresses of a service and the one in use, which is the next one after each failure. Thread-safe.

    Args:
        addresses: ``host:port`` of one replica or more, in the order in which they are tried.

    Raises:
        InvalidArgument: there is none, or one is a URL, or has no valid port.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise InvalidArgument("no address of a service was given", fix='name one, such as "127.0.0.1:50051"')
        for address in addresses:
            _check(address)
        self.all = tuple(dict.fromkeys(addresses))
        self._lock = threading.Lock()
        self._current = 0
        self._failed: set[str] = set()
        self._answered: set[str] = set()
        self._away = False

    @staticmethod
    def of(server: str | None) -> Addresses:
        """The addresses in a client's argument, separated by commas; by default ``WEIGHBRIDGE_SERVER``, or port 50051
        of this machine.
        """
        named = server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
        return Addresses([each for each in (part.strip() for part in named.split(",")) if each])

    def __str__(self) -> str:
        return ",".join(self.all)

    @property
    def current(self) -> str:
        """The address in use."""
        return self.all[self._current]

    @property
    def away(self) -> bool:
        """Whether no address has answered since one could not be reached."""
        return self._away

    def answered(self, address: str) -> None:
        """Note that an address can be reached."""
        if self._failed or self._away or address not in self._answered:
            with self._lock:
                self._away = False
                self._failed.clear()
                self._answered.add(address)

    def use(self, address: str) -> None:
        """Use an address, if it is one of these."""
        with self._lock:
            if address in self.all:
                self._current = self.all.index(address)

    def failed(self, address: str, error: Unavailable | None = None) -> bool:
        """Note that an address cannot be reached, and use the next one from now on.

        Args:
            address: the address.
            error: its error. Its `worth_retrying` is lifted if a retry may help: the address has answered before, or
                the next one has not failed yet.

        Returns:
            Whether the next address has not failed too since one answered, so that it is worth a retry at once.
        """
        hopeful = self._fail(address)
        if error is not None and (hopeful or address in self._answered):
            error.worth_retrying = math.inf
        return hopeful

    def _fail(self, address: str) -> bool:
        if address not in self.all:  # a replica that the service has named
            return False
        with self._lock:
            self._away = True
            self._failed.add(address)
            if self.current == address:
                self._current = (self._current + 1) % len(self.all)
            if len(self._failed) < len(self.all):
                return self.current not in self._failed
            self._failed.clear()  # a further round over all of them, after a pause
            return False


def _check(address: str) -> None:
    """Refuse an address that gRPC would misread, or would only fail to reach after a while."""
    scheme, url, rest = address.partition("://")
    if url and "/" not in rest.rstrip("/"):
        raise InvalidArgument(
            f"{address[:200]!r} is a URL, and the service is reached over gRPC",
            fix=f"write HOST:PORT, with its gRPC port, such as {rest.partition(':')[0] or '127.0.0.1'}:{_PORT}",
        )
    if scheme.startswith("unix:"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(
            f"{address[:200]} has no port between 1 and 65535",
            fix=f"write HOST:PORT, such as {(address if not colon else host) or '127.0.0.1'}:{_PORT}",
        )
