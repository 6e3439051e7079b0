"""Attempts to take something to a version, repeated after failures for as long as a ref names it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weighbridge._clients.client import Client
from weighbridge.errors import WeighbridgeError

TRIES = 3
"""How often a version is tried before the next one is waited for."""


def attempts(client: Client, model: str, ref: str, number: int, retry_seconds: float) -> Iterator[None]:
    """Attempts at a version, of which the caller makes one for each that is given, until one succeeds. They end when the ref names another
    version, or with the last of `TRIES`.

    Args:
        client: of the service.
        model: ``namespace/name``.
        ref: which ref names the version.
        number: of the version.
        retry_seconds: pause before the second attempt, twice as long before each further one.
    """
    yield
    for tried in range(TRIES - 1):
        time.sleep(retry_seconds * 2**tried)
        if named(client, model, ref) not in (number, None):
            return
        yield


def named(client: Client, model: str, ref: str) -> int | None:
    """The version that a ref names now; None if the service cannot be asked."""
    try:
        return client.version(model, ref).number
    except WeighbridgeError:
        return None
