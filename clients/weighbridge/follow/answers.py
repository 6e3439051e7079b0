"""HTTP API of an engine.

A response that is truncated, not JSON or malformed counts as an error of the engine; it does not end an agent.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weighbridge._core.text.shortening import shortened
from weighbridge._transport.proxies import opener
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.engines import EngineFailed

_MOST_SAID, _LONGEST_PAGE = 200, 500
_NOT_FOUND = b'"type": "NotFound"'
"""Name of the error in a response of one of weighbridge's routes if the named object does not exist.

The route itself exists.
"""
_FORM = ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError
"""Errors of code that reads a malformed response."""


_waiting: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()
"""Connections of calls of `ask` that may still be waiting for a response."""
_adding = threading.Lock()
"""Lock for adding to `_waiting` or iterating over it, because several threads make calls."""


class _HttpCalls(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connection, req)


class _HttpsCalls(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connection_with_tls, req)


def _connection(host: str, **options: Any) -> http.client.HTTPConnection:
    return _kept(http.client.HTTPConnection(host, **options))


def _connection_with_tls(host: str, **options: Any) -> http.client.HTTPConnection:
    return _kept(http.client.HTTPSConnection(host, **options))


def _kept(connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
    with _adding:
        _waiting.add(connection)
    return connection


def abandon(url: str) -> None:
    """End all pending calls of `ask` to a server: each raises OSError.

    A server that shuts down waits for open connections. Some calls to a vLLM server never get a response after its
    engine died.

    Args:
        url: an address of the server; only its host and port are used.
    """
    place = _place(url)
    with _adding:
        found = list(_waiting)
    for connection in found:
        sock = connection.sock  # its own thread sets it to None when the call ends
        if sock is not None and (connection.host.lower(), connection.port) == place:
            with suppress(OSError):
                # not the method of TLS sockets, which removes the encryption while another thread reads
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _place(url: str) -> tuple[str, int]:
    found = urllib.parse.urlsplit(url)
    return found.hostname or "", found.port or (443 if found.scheme == "https" else 80)


class HttpAnswer(NamedTuple):
    """A response, successful or not."""

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether the status is an error."""
        return not 200 <= self.status < 300


def ask(request: urllib.request.Request, timeout: float) -> HttpAnswer:
    """Make a request, and read the whole response.

    Raises:
        TimeoutError: the response did not arrive in time.
        OSError: no response, or an incomplete one, arrived.
    """
    try:
        try:
            with opener(request.full_url, _HttpCalls(), _HttpsCalls()).open(request, timeout=timeout) as answer:
                return HttpAnswer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read())
    except http.client.HTTPException as error:
        raise ConnectionError(str(error) or repr(error)) from error


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Block that reads a response.

    Args:
        where: its URL.

    Raises:
        EngineFailed: the response does not have the form that the block expects.
    """
    try:
        yield
    except WeighbridgeError:
        raise
    except _FORM as error:
        raise EngineFailed(
            f"{where} returned an unexpected response: {shortened(repr(error), _MOST_SAID)}",
            fix=(
                "check that the address is the engine's own, and that the same release of "
                "weighbridge is installed where it runs"
            ),
        ) from error


class NoRoute(EngineFailed):
    """The route does not exist on the server."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """API of one server.

    Attributes:
        url: URL of the server, without a trailing slash.
        timeout: seconds for each call.
        other: what to do if the server lacks a route.
        headers: headers of each call.
    """

    url: str
    timeout: float
    other: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON response of the server; uses GET if there is no body.

        Raises:
            NoRoute: the route does not exist.
            EngineFailed: the server is unreachable, does not respond in time or like an engine, or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310  # the user names the server
        try:
            answer = ask(request, self.timeout)
        except OSError as error:
            raise EngineFailed(
                f"the engine at {self.url} cannot be reached: {error}",
                fix="start it, or name its address with --url",
            ) from error
        if answer.is_error:
            raise refused(path, answer.status, answer.body, self.other)
        with understood(self.url + path):
            return json.loads(answer.body) if answer.body else {}


def refused(path: str, status: int, body: bytes, other: str) -> EngineFailed:
    """Error for a call that the server refused, created from its response.

    Args:
        path: path of the call.
        status, body: status and body of the response.
        other: what to do if the server lacks the route.
    """
    if status == 404 and _NOT_FOUND not in body:
        return NoRoute(f"the engine has no {path}", fix=other)
    text = shortened(body.decode(errors="replace"), _LONGEST_PAGE)
    with suppress(ValueError):
        said = json.loads(body)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    return EngineFailed(f"the engine refused {path}: {text.strip() or f'HTTP status {status}'}")
