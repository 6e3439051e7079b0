"""Limits of a policy: what an identity may have at one time or in an hour, and what a namespace may hold.

::

    [[identity]]
    name = "trainer"
    limits = {streams = 8, bytes_per_second = "2GB", versions_per_hour = 60}

    [[namespace]]
    name = "acme"
    stored = "20TB"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge._core.text.sizes import parse_size
from weighbridge.errors import InvalidArgument

OF_IDENTITY = {"streams", "bytes_per_second", "versions_per_hour"}
OF_NAMESPACE = {"name", "stored"}
_MOST_STREAMS = 65_536
_MOST_VERSIONS = 100_000
_LEAST_RATE = 1_000_000
"""Bytes a second: a message of 1 MiB takes a second then, and the other side does not take the stream for dead."""
_MOST_BYTES = 2**53
_NAMESPACE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an identity may have; None is no limit.

    Attributes:
        streams: of weights, at one time, at each replica of the service.
        bytes_per_second: of weights, over all of its streams, at each replica.
        versions_per_hour: that it opens, at each replica.
    """

    streams: int | None = None
    bytes_per_second: int | None = None
    versions_per_hour: int | None = None


NO_LIMITS = Limits()


def limits_of(table: Mapping[str, Any], where: str) -> Limits:
    """The limits of an identity, from its table; ``where`` names it in errors.

    Raises:
        InvalidArgument: one of them is not what it should be.
    """
    found = Limits(
        _count(table, "streams", where, _MOST_STREAMS),
        _size(table, "bytes_per_second", where, _LEAST_RATE),
        _count(table, "versions_per_hour", where, _MOST_VERSIONS),
    )
    if found.bytes_per_second is not None and found.streams is None:
        raise InvalidArgument(
            f"{where} limit bytes_per_second and no streams: each stream that is slowed keeps a thread of the service",
            fix="write streams = 8, or as many as it needs at one time",
        )
    return found


def stored_limits(tables: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that each namespace may hold, by its name. Raises InvalidArgument: says of which one what is wrong."""
    found: dict[str, int] = {}
    for table in tables:
        name = table.get("name")
        if not isinstance(name, str) or not _NAMESPACE.fullmatch(name):
            raise InvalidArgument(
                f"{str(name)[:80]!r} of the policy is no namespace",
                fix='write name = "acme", the first half of the names of its models',
            )
        where = f"the namespace {name!r}"
        if name in found:
            raise InvalidArgument(f"{where} stands there twice", fix="name each once")
        stored = _size(table, "stored", where, 1)
        if stored is None:
            raise InvalidArgument(f"{where} has no limit", fix='write stored = "20TB"')
        found[name] = stored
    return found


def _count(table: Mapping[str, Any], key: str, where: str, most: int) -> int | None:
    value = table.get(key)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise InvalidArgument(
            f"{key} of {where} is {str(value)[:80]!r}, not a whole number from 1 to {most}",
            fix=f"write {key} = 8, or leave it out for no limit",
        )
    return value


def _size(table: Mapping[str, Any], key: str, where: str, least: int) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    try:
        # a bare number could be meant in any unit
        size = parse_size(value) if isinstance(value, str) and value[-1:].isalpha() else 0
    except InvalidArgument:
        size = 0
    if not least <= size <= _MOST_BYTES:
        more = f", from {least // 1_000_000}MB on" if least > 1 else ""
        raise InvalidArgument(
            f"{key} of {where} is {str(value)[:80]!r}, not a size with a unit{more}",
            fix=f'write {key} = "2GB", or leave it out for no limit' if more else f'write {key} = "20TB"',
        )
    return size
