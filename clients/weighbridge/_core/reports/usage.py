"""Limits of a service's policy, and how much of them is used."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

__all__ = ["Quota", "Usage"]

QUOTA_STREAMS = "streams"
"""Streams of weights of an identity at one time."""
QUOTA_BYTES_PER_SECOND = "bytes_per_second"
"""Bytes a second over all streams of an identity."""
QUOTA_VERSIONS_PER_HOUR = "versions_per_hour"
"""Versions that an identity opens in an hour."""
QUOTA_STORED = "stored"
"""Bytes of the versions of a namespace."""


@dataclass(frozen=True, slots=True)
class Quota(JsonValue):
    """A limit, and how much of it is used."""

    kind: str
    """`streams`, `bytes_per_second` and `versions_per_hour` of an identity, `stored` of a namespace, in bytes."""
    of: str
    """The identity or the namespace."""
    used: int
    """Of `stored`, at all replicas together; of the others, at the one that was asked."""
    limit: int
    """How much there may be."""


@dataclass(frozen=True, slots=True)
class Usage(JsonValue):
    """The limits that the caller has, and those of namespaces of which it may look at a model."""

    identity: str
    """Who the caller is, in the service's policy."""
    quotas: tuple[Quota, ...]
    """Their limits, and those of namespaces of which they may look at a model; empty if there are none."""
