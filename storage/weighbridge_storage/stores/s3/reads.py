"""Reads from S3. They verify that all requested bytes arrive and belong to one object.

botocore retries a request, but not the body of a response. This module requests a body again if it is cut short or does
not match the server's checksum.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from typing import Any, TypeVar

from botocore.exceptions import FlexibleChecksumError
from urllib3.exceptions import HTTPError

from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_storage.stores.objects import check_whole
from weighbridge_storage.stores.s3.client import ObjectState, S3Client, pause
from weighbridge_storage.stores.s3.errors import S3_ERRORS, s3_error, status_of, translated
from weighbridge_storage.stores.s3.settings import S3Settings

T = TypeVar("T")

_ATTEMPTS = 6
_PIECE = 8 << 20
"""Bytes of a piece of a stream: large enough that the time to the first byte of a response is insignificant."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class _Changed(Exception):
    """The object was replaced since its etag was read."""


class _Damaged(Exception):
    """The body is not the requested data."""


class Reads:
    """Reads of objects by their full names. ``what`` is the operation, for messages. Thread-safe.

    Args:
        client: makes the requests.
        settings: sizes and limits.
        pool: fetches ranges.
    """

    def __init__(self, client: S3Client, settings: S3Settings, pool: Executor) -> None:
        self._client = client
        self._settings = settings
        self._pool = pool

    def head(self, name: str, what: str) -> ObjectState:
        """Size and etag of an object."""
        with translated(what):
            return self._client.head(name)

    def get(self, name: str, what: str) -> tuple[bytes, str]:
        """Content and etag of an object."""

        def take(response: Mapping[str, Any]) -> tuple[bytes, str]:
            check_whole(response["ContentLength"], what)
            return response["Body"].read(), response["ETag"]

        return _tried(lambda: self._client.get(name), take, what)

    def read_range(self, name: str, start: int, length: int, what: str) -> bytes:
        """Bytes of an object.

        Raises:
            InvalidArgument: the range is not within the object.
        """
        if start < 0 or length <= 0:  # HTTP cannot express such ranges
            size = self.head(name, what).size
            if start < 0 or length < 0 or start > size:
                raise _outside(start, length, size, what)
            return b""

        try:
            return self._range(name, start, length, None, what)
        except InvalidArgument as error:
            raise _outside(start, length, self.head(name, what).size, what) from error

    def stream(self, name: str, what: str) -> Iterator[bytes]:
        """The whole object, piece by piece; some pieces after the current one are prefetched."""
        found = self.head(name, what)
        return self._pieces(name, found, what)

    def _pieces(self, name: str, found: ObjectState, what: str) -> Iterator[bytes]:
        spans = ((start, min(_PIECE, found.size - start)) for start in range(0, found.size, _PIECE))
        coming: deque[Future[bytes]] = deque()
        try:
            for start, length in spans:
                coming.append(self._pool.submit(self._range, name, start, length, found.etag, what))
                if len(coming) > self._settings.parallel:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        except _Changed as error:
            raise Unavailable(f"{what} failed: it was replaced during the read", fix="try again") from error
        finally:
            for piece in coming:
                piece.cancel()

    def _range(self, name: str, start: int, length: int, etag: str | None, what: str) -> bytes:
        def take(response: Mapping[str, Any]) -> bytes:
            _check_range(response, start, length, what)
            data: bytes = response["Body"].read()
            if len(data) != length:
                raise _Damaged(f"received {len(data)} bytes instead of {length}")
            return data

        return _tried(lambda: self._client.get_range(name, start, length, etag), take, what)


def _tried(request: Callable[[], Mapping[str, Any]], take: Callable[[Mapping[str, Any]], T], what: str) -> T:
    """Result of ``take`` for the response; retries a few times if the body is damaged."""
    failure: Exception
    for attempt in range(_ATTEMPTS):
        try:
            response = request()
        except S3_ERRORS as error:
            if status_of(error) == 412:
                raise _Changed from error
            raise s3_error(error, what) from error
        try:
            with closing(response["Body"]):
                return take(response)
        except (*S3_ERRORS, HTTPError, _Damaged) as error:
            failure = error
        pause(attempt)
    if isinstance(failure, FlexibleChecksumError):
        raise s3_error(failure, what) from failure
    raise Unavailable(
        f"{what} failed: the body of the response was cut short {_ATTEMPTS} times",
        fix="check the network, then try again",
    ) from failure


def _check_range(response: Mapping[str, Any], start: int, length: int, what: str) -> None:
    found = _CONTENT_RANGE.fullmatch(response.get("ContentRange", ""))
    if found is None or int(found[1]) != start:
        raise _Damaged("the response is not the range that was asked for")
    if int(found[2]) < start + length:
        raise _outside(start, length, int(found[2]), what)


def _outside(start: int, length: int, size: int, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} failed: bytes {start} to {start + length} are not within it, which has {size} bytes"
    )
