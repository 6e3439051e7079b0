"""Answers of an engine's HTTP API. One that breaks off, is no JSON or has another form is an error of the engine, and ends no agent."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from weighbridge._core.text.shortening import shortened
from weighbridge._transport.proxies import opener
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.engines import EngineFailed

_MOST_SAID = 200
_FORM = ValueError, TypeError, LookupError, AttributeError, RecursionError
"""Errors of code that reads an answer which has another form."""


class HttpAnswer(NamedTuple):
    """An answer, whether it is an error or not."""

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether the server has not done what it was asked for."""
        return not 200 <= self.status < 300


def ask(request: urllib.request.Request, timeout: float) -> HttpAnswer:
    """Make a request, and read the whole answer.

    Raises:
        TimeoutError: it did not come in time.
        OSError: it did not come, or not all of it.
    """
    try:
        try:
            with opener(request.full_url).open(request, timeout=timeout) as answer:
                return HttpAnswer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read())
    except http.client.HTTPException as error:
        raise ConnectionError(str(error) or repr(error)) from error


@contextmanager
def understood(where: str) -> Iterator[None]:
    """In the block, an answer is read.

    Args:
        where: its URL.

    Raises:
        EngineFailed: the answer has another form than the block expects.
    """
    try:
        yield
    except WeighbridgeError:
        raise
    except _FORM as error:
        raise EngineFailed(
            f"{where} has given an answer that cannot be understood: {shortened(repr(error), _MOST_SAID)}",
            fix="see whether the address is the engine's own, and whether the same release of weighbridge is installed where it runs",
        ) from error
