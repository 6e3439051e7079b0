"""Attempts to update something to a version. They are repeated after failures as long as a ref names the version."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weighbridge._clients.client import Client
from weighbridge.errors import WeighbridgeError

TRIES = 3
"""Number of attempts at a version. After the last one the caller waits for the next version."""


def attempts(client: Client, model: str, ref: str, number: int, retry_seconds: float) -> Iterator[None]:
    """Yield once for each attempt at a version. The caller makes one attempt per item and stops after a success. The
    iterator ends when the ref names another version, and after `TRIES` attempts.

    Args:
        client: client of the service.
        model: ``namespace/name``.
        ref: the ref that names the version.
        number: number of the version.
        retry_seconds: pause before the second attempt, doubled before each further one.
    """
    yield
    for tried in range(TRIES - 1):
        time.sleep(retry_seconds * 2**tried)
        if named(client, model, ref) not in (number, None):
            return
        yield


def named(client: Client, model: str, ref: str) -> int | None:
    """Return the version that a ref names now; None if the service does not respond."""
    try:
        return client.version(model, ref).number
    except WeighbridgeError:
        return None
