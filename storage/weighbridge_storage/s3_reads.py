"""How are bytes read from S3 such that they are all that was asked for, and of one object?

botocore tries a request again, but not the body of a response: one that ends too soon, or does not agree with the server's
checksum, is asked for again here.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from botocore.exceptions import FlexibleChecksumError
from urllib3.exceptions import HTTPError

from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_storage.objects import ByteArray, error_for
from weighbridge_storage.s3_client import Found, S3Client
from weighbridge_storage.s3_errors import S3_ERRORS, s3_error, status_of
from weighbridge_storage.s3_parts import Sending
from weighbridge_storage.s3_settings import S3Settings

T = TypeVar("T")

_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.05
_STEP = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class _Changed(Exception):
    """The object was replaced since its etag was read."""


class _Damaged(Exception):
    """The body is not what was asked for."""


class Reads:
    """Reads objects by their full names; ``what`` says what is being done, for messages. Safe to use from many threads.

    Args:
        client: makes the requests.
        settings: sizes and bounds.
        pool: fetches ranges.
        scratch: folder for the bytes that `fetch` brings; None keeps them in memory.
    """

    def __init__(self, client: S3Client, settings: S3Settings, pool: Executor, scratch: Path | None) -> None:
        self._client = client
        self._settings = settings
        self._pool = pool
        self._scratch = scratch

    def head(self, name: str, what: str) -> Found:
        """Size and etag of an object."""
        try:
            return self._client.head(name)
        except S3_ERRORS as error:
            raise s3_error(error, what) from error

    def get(self, name: str, what: str) -> tuple[bytes, str]:
        """Content and etag of an object."""

        def take(response: Mapping[str, Any]) -> tuple[bytes, str]:
            return response["Body"].read(), response["ETag"]

        return _tried(lambda: self._client.get(name), take, what)

    def read_range(self, name: str, start: int, length: int, what: str) -> bytes:
        """Bytes of an object.

        Raises:
            InvalidArgument: they do not lie within it.
        """
        if start < 0 or length <= 0:  # HTTP has no such ranges
            size = self.head(name, what).size
            if start < 0 or length < 0 or start > size:
                raise _outside(start, length, size, what)
            return b""

        def take(response: Mapping[str, Any]) -> bytes:
            _check_range(response, start, length, what)
            data: bytes = response["Body"].read()
            if len(data) != length:
                raise _Damaged(f"{len(data)} bytes came instead of {length}")
            return data

        try:
            return _tried(lambda: self._client.get_range(name, start, length, None), take, what)
        except InvalidArgument as error:
            raise _outside(start, length, self.head(name, what).size, what) from error

    def fetch(self, name: str, what: str) -> ByteArray:
        """The whole object as a read-only array, brought in ranges side by side."""
        for attempt in range(_ATTEMPTS):
            found = self.head(name, what)
            if found.size == 0:
                return np.frombuffer(b"", dtype=np.uint8)
            room = self._room(found.size, what)
            try:
                self._fill(name, found, memoryview(room), what)
            except _Changed:
                _pause(attempt)
                continue
            return np.frombuffer(memoryview(room).toreadonly(), dtype=np.uint8)
        raise Unavailable(f"{what} failed: it is replaced again and again", fix="try again")

    def _fill(self, name: str, found: Found, target: memoryview, what: str) -> None:
        with Sending[None](self._pool) as ranges:
            for start in range(0, found.size, self._settings.part_bytes):
                part = target[start : start + self._settings.part_bytes]
                request = partial(self._client.get_range, name, start, len(part), found.etag)
                take = partial(_take_into, part, start, what)
                ranges.submit(partial(_tried, request, take, what))
            ranges.results()

    def _room(self, nbytes: int, what: str) -> mmap.mmap:
        """Memory, or an unlinked file, that goes when the last array over it goes."""
        try:
            if self._scratch is None:
                return mmap.mmap(-1, nbytes)
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                # Without this, a disk that is full would be a SIGBUS in the middle of a copy.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise error_for(error, what) from error


def _take_into(target: memoryview, start: int, what: str, response: Mapping[str, Any]) -> None:
    _check_range(response, start, len(target), what)
    done = 0
    while done < len(target):
        data = response["Body"].read(min(_STEP, len(target) - done))
        if not data:
            raise _Damaged(f"{done} bytes came instead of {len(target)}")
        target[done : done + len(data)] = data
        done += len(data)


def _tried(request: Callable[[], Mapping[str, Any]], take: Callable[[Mapping[str, Any]], T], what: str) -> T:
    """What ``take`` gets out of the response, asking some times if its body is damaged."""
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
        _pause(attempt)
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
        f"{what} failed: bytes {start} to {start + length} do not lie within it, which has {size} bytes"
    )


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0, _FIRST_PAUSE_S * 2**attempt))
