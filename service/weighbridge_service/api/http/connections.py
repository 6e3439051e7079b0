"""Connections of the HTTP server: limits on their number, and timeouts for idle ones.

uvicorn closes a connection that is idle for five seconds between two requests, but has no timeout for a request's
headers. It notices a connection only after its TLS handshake, for which asyncio allows a minute. So this module accepts
connections, and counts them at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from weighbridge_service.access.certificates import names_from_tls
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.http.callers import CERTIFICATE

log = logging.getLogger(__name__)

_ACCEPT_PAUSE = 0.5
"""Seconds to pause when connections cannot be accepted, for example without free file descriptors."""


class Listener:
    """Accepts connections, and counts each until it is closed.

    Args:
        listening: the socket.
        most: maximum number of connections. Further ones are closed at once. When only a fourth of them is left, new
            connections from hosts that already have many are closed at once as well.
        seconds: timeout for a client's TLS handshake.
    """

    def __init__(self, listening: socket.socket, most: int, seconds: float) -> None:
        self._listening = listening
        self._quota = HostQuota("HTTP connections", most)
        self._seconds = seconds
        self._stopping = False

    async def accept(
        self, protocol: Callable[[Callable[[], None]], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        """Accept connections until `stop`.

        Args:
            protocol: creates the protocol of a connection; its argument is the callback for the loss of the connection.
            tls: TLS context for all connections; None without TLS.
        """
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        beginning: set[asyncio.Task[None]] = set()
        while not self._stopping:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if not self._stopping:
                    log.warning("a client could not connect by HTTP: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            host = str(address[0])
            if not self._quota.try_take(host):
                log.debug("%s", self._quota.refusal(host))
                connection.close()
                continue
            leave = _Once(partial(self._quota.give, host))
            task = loop.create_task(self._begin(connection, leave, partial(protocol, leave), tls))
            beginning.add(task)
            task.add_done_callback(beginning.discard)

    def stop(self) -> None:
        """Accept no more connections. May be called from any thread, and repeatedly."""
        self._stopping = True
        with suppress(OSError):  # already closed
            self._listening.shutdown(socket.SHUT_RDWR)

    async def _begin(
        self,
        connection: socket.socket,
        leave: Callable[[], None],
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        seconds = None if tls is None else self._seconds
        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=tls, ssl_handshake_timeout=seconds)
        except OSError as error:
            log.debug("a client disconnected before its first request: %s", error)
            connection.close()
            leave()


class _Once:
    """A callback that runs only on the first call.

    Args:
        do: the callback.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def __call__(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()


def connections(seconds: float) -> type[H11Protocol]:
    """The protocol class for uvicorn's connections.

    Args:
        seconds: timeout from the beginning of the connection, or the end of a response, to the end of a request's
            headers.
    """

    class HttpConnection(H11Protocol):
        leave: Callable[[], None] | None = None
        _due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            tls = transport.get_extra_info("ssl_object")
            if tls is not None:
                # a resumed session, which TLS 1.2 allows, skips the verification of the certificate
                names = () if tls.session_reused else names_from_tls(tls.getpeercert(binary_form=True))
                self.app_state = {**self.app_state, CERTIFICATE: names}
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            if self.leave is not None:
                self.leave()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def send_400_response(self, msg: str) -> None:
            cycle: RequestResponseCycle | None = self.cycle
            if cycle is not None and not cycle.response_complete:  # the application must not answer, too
                cycle.disconnected = True
                cycle.message_event.set()
                if cycle.response_started:
                    self.transport.abort()
                    return
            super().send_400_response(msg)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def _watch(self) -> None:
            cycle: RequestResponseCycle | None = (
                self.cycle
            )  # None before the first request, whatever uvicorn's annotation says
            if cycle is not None and not cycle.response_complete:
                self._unwatch()
            elif self._due is None and not self.transport.is_closing():
                self._due = self.loop.call_later(seconds, self.transport.abort)

        def _unwatch(self) -> None:
            if self._due is not None:
                self._due.cancel()
                self._due = None

    return HttpConnection
