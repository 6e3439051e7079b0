"""Limits of a service's policy, and how much of them is used."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

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
    """A limit, and how much of it is used.

    Attributes:
        kind: `QUOTA_STREAMS`, `QUOTA_BYTES_PER_SECOND`, `QUOTA_VERSIONS_PER_HOUR` or `QUOTA_STORED`, or what a later release adds.
        of: the identity or the namespace.
        used: of `QUOTA_STORED`, at all replicas together; of the others, at the one that was asked.
        limit: how much there may be.
    """

    kind: str
    of: str
    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class Usage(JsonValue):
    """What somebody may have, and what of it is used.

    Attributes:
        identity: who it is, in the service's policy.
        quotas: their limits, and those of namespaces of which they may look at a model; empty if there are none.
    """

    identity: str
    quotas: tuple[Quota, ...]
