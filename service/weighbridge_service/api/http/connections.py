"""Connections of the HTTP face: so many, and none that says nothing.

uvicorn gives a client that is between two requests five seconds, and one that has not come to the end of its first, or of any, for ever.
"""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from weighbridge_service.access.certificates import names_from_tls
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.http.callers import CERTIFICATE

log = logging.getLogger(__name__)


def connections(most: int, seconds: float) -> type[H11Protocol]:
    """The protocol that uvicorn speaks on its connections.

    Args:
        most: how many there may be; who comes then is cut off, and so is who has many when a fourth is left.
        seconds: how long a client may take from its connection, or from the end of a response, to the end of a request's headers.
    """

    quota = HostQuota("HTTP connections", most)

    class Connection(H11Protocol):
        _due: asyncio.TimerHandle | None = None
        _host: str | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            tls = transport.get_extra_info("ssl_object")
            if tls is not None:
                # of a session that is resumed, as TLS 1.2 lets clients, nobody has verified the certificate again
                names = () if tls.session_reused else names_from_tls(tls.getpeercert)
                self.app_state = {**self.app_state, CERTIFICATE: names}
            host = str((transport.get_extra_info("peername") or ("",))[0])
            if quota.try_take(host):
                self._host = host
                self._watch()
            else:
                log.debug("%s", quota.refusal(host))
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            if self._host is not None:
                quota.give(self._host)
                self._host = None
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

    return Connection
