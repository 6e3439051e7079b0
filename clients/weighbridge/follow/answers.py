"""HTTP API of an engine. An answer that breaks off, is no JSON or has another form is an error of the engine, and ends no agent."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from weighbridge._core.text.shortening import shortened
from weighbridge._transport.outages import Outage
from weighbridge._transport.proxies import opener
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.engines import EngineFailed

_MOST_SAID, _LONGEST_PAGE = 200, 500
_FORM = ValueError, TypeError, LookupError, AttributeError, RecursionError
"""Errors of code that reads an answer which has another form."""


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


class NoRoute(EngineFailed):
    """The server has no such route."""


class EngineApi:
    """API of one server. While the server cannot be reached, it says so at level WARNING: since when, and that it is back.

    Args:
        url: of the server, without a slash at its end.
        timeout: seconds for each call.
        other: what to do if the server lacks a route.
        headers: of each call.
    """

    def __init__(
        self, url: str, timeout: float, other: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._other = other
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._outage = Outage(url, "engine")

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON that the server answers; a GET without a body.

        Raises:
            NoRoute: it has no such route.
            EngineFailed: it cannot be reached, does not answer in time or as an engine does, or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)  # noqa: S310  # the user names the server
        refusal = 0
        try:
            try:
                with opener(request.full_url).open(request, timeout=self._timeout) as answer:
                    found = answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    refusal, found = error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            away = EngineFailed(
                f"the engine at {self._url} cannot be reached: {str(error) or repr(error)}",
                fix="start it, or name its address with --url",
            )
            self._outage.failed(away)
            raise away from error
        self._outage.over()
        if refusal:
            raise refused(path, refusal, found, self._other)
        with understood(self._url + path):
            return json.loads(found) if found else {}


def refused(path: str, status: int, body: bytes, other: str) -> EngineFailed:
    """What a server's answer to a call says that it did not do.

    Args:
        path: that was called.
        status, body: of the answer.
        other: what to do if the server lacks the route.
    """
    if status == 404:
        return NoRoute(f"the engine has no {path}", fix=other)
    text = shortened(body.decode(errors="replace"), _LONGEST_PAGE)
    with suppress(ValueError):
        said = json.loads(body)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    return EngineFailed(f"the engine refused {path}: {text.strip() or f'HTTP status {status}'}")
