"""Requested ranges of a file, and conditions on its content (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weighbridge.errors import WeighbridgeError

_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]*)\s*-\s*([0-9]*)\s*", re.IGNORECASE)
_MOST_DIGITS = 19
"""Numbers with more digits are beyond the end of any file."""
_TAG = re.compile(r'(W/)?("[^"]*")')


class RangeNotSatisfiable(WeighbridgeError):
    """No byte of the file is in the requested range.

    Attributes:
        size: size of the file, in bytes.
    """

    reason = "RANGE_NOT_SATISFIABLE"
    http_status = 416

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the file has {size} bytes, and the range starts after its end",
            fix="request bytes within the file",
        )
        self.size = size


class ContentChanged(WeighbridgeError):
    """The file's content does not match the request's condition.

    Attributes:
        etag: ETag of the file's content, in quotes.
    """

    reason = "CONTENT_CHANGED"
    http_status = 412

    def __init__(self, etag: str) -> None:
        super().__init__(
            "the content of the file does not match If-Match",
            fix=f"start again with the current ETag: {etag}",
        )
        self.etag = etag


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes from ``start`` up to ``end`` (exclusive). ``partial`` is whether the request contained a range."""

    start: int
    end: int
    partial: bool = True


def byte_range(header: str | None, size: int) -> ByteRange:
    """The byte range that a Range header requests.

    A header that is malformed, or has another unit or several ranges, is ignored, as the standard allows: the range is
    the whole file.

    Args:
        header: value of the header; None if there is none.
        size: size of the file, in bytes.

    Raises:
        RangeNotSatisfiable: none of the bytes exist.
    """
    whole = ByteRange(0, size, partial=False)
    match = _RANGE.fullmatch(header) if header is not None else None
    if match is None:
        return whole
    first, last = (_number(digits) for digits in match.groups())
    if first is None:
        if last is None:
            return whole
        start, end = max(size - last, 0), size
    else:
        if last is not None and last < first:
            return whole
        start, end = first, size if last is None else min(last + 1, size)
    if start >= end:
        raise RangeNotSatisfiable(size)
    return ByteRange(start, end)


def is_unchanged(etag: str, if_match: str | None, if_none_match: str | None) -> bool:
    """Whether the client has the content already, so that the response is 304.

    Args:
        etag: strong ETag of the content, in quotes.
        if_match: value of the If-Match header, with all its lines joined; None without this header.
        if_none_match: value of the If-None-Match header, in the same form.

    Raises:
        ContentChanged: If-Match requires another content.
    """
    # a weak tag never matches If-Match, because the bytes may differ
    if if_match is not None and if_match != "*" and ("", etag) not in _TAG.findall(if_match):
        raise ContentChanged(etag)
    if if_none_match is None:
        return False
    return if_none_match == "*" or any(tag == etag for _, tag in _TAG.findall(if_none_match))


def _number(digits: str) -> int | None:
    digits = digits.lstrip("0") or digits[:1]
    if len(digits) > _MOST_DIGITS:
        return int(10**_MOST_DIGITS)
    return int(digits) if digits else None
