"""Tickets for streams of weights: issued by a control call, presented by the stream, verified locally.

A ticket has the host that it was issued to, its expiry, and a message authentication code over both (HMAC-SHA256, RFC
2104). All replicas over one store have the same key. A ticket does not prove an identity: it proves that a service has
admitted the caller.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from weighbridge.errors import Conflict, DataLoss, NotFound, Unavailable
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.stores.objects import ObjectStore

VALID_SECONDS = 3600
_KEY = "service/ticket-key"
_KEY_BYTES = 32
_CODE_BYTES = 16
_EXPIRY = struct.Struct(">Q")


def ticket_key(store: ObjectStore) -> bytes:
    """The key of all replicas over a store, created by the first of them.

    Raises DataLoss if it has the wrong length.
    """
    while True:
        try:
            key, _ = store.get(_KEY)
        except NotFound:
            with suppress(Conflict):
                store.put(_KEY, secrets.token_bytes(_KEY_BYTES), mode="create")
            continue
        if len(key) != _KEY_BYTES:
            raise DataLoss(
                f"{_KEY} in the object store has {len(key)} bytes, not {_KEY_BYTES}",
                fix="delete it: a service writes a new one when it starts",
            )
        return key


@dataclass(frozen=True, slots=True)
class Tickets:
    """Issues and verifies tickets.

    Attributes:
        key: key of the message authentication code.
        clock: returns milliseconds since 1970 UTC.
    """

    key: bytes
    clock: Callable[[], int] = unix_ms

    def give(self, host: str) -> str:
        """Issue a ticket for a host, valid for `VALID_SECONDS`."""
        text = _EXPIRY.pack(self.clock() + VALID_SECONDS * 1000) + host.encode()
        return base64.urlsafe_b64encode(text + self._code(text)).decode()

    def host_of(self, ticket: str) -> str:
        """The host that a ticket was issued to.

        Raises:
            Unavailable: the ticket is forged, malformed or expired; the caller asks for a new one.
        """
        try:
            raw = base64.urlsafe_b64decode(ticket.encode())
        except (binascii.Error, ValueError):
            raw = b""
        text, code = raw[:-_CODE_BYTES], raw[-_CODE_BYTES:]
        genuine = len(text) >= _EXPIRY.size and hmac.compare_digest(self._code(text), code)
        if not genuine or _EXPIRY.unpack_from(text)[0] < self.clock():
            raise Unavailable(
                "the call has no valid ticket for streams of weights",
                fix="ask BulkService.GetTicket for one, at the port for control calls",
            )
        return text[_EXPIRY.size :].decode()

    def _code(self, text: bytes) -> bytes:
        return hmac.new(self.key, text, hashlib.sha256).digest()[:_CODE_BYTES]
