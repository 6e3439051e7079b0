"""Limits of a service's policy, and their usage."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

__all__ = ["Quota", "Usage"]

QUOTA_STREAMS = "streams"
"""Limit of concurrent streams of weights of an identity."""
QUOTA_BYTES_PER_SECOND = "bytes_per_second"
"""Limit of bytes per second over all streams of an identity."""
QUOTA_VERSIONS_PER_HOUR = "versions_per_hour"
"""Limit of versions that an identity opens in an hour."""
QUOTA_STORED = "stored"
"""Limit of bytes of all versions of a namespace."""


@dataclass(frozen=True, slots=True)
class Quota(JsonValue):
    """A limit and its usage."""

    kind: str
    """`streams`, `bytes_per_second` and `versions_per_hour` of an identity, `stored` of a namespace, in bytes."""
    of: str
    """The identity or the namespace."""
    used: int
    """Usage: of `stored` at all replicas together; of the other kinds at the replica that answers."""
    limit: int
    """Largest usage that the policy allows."""


@dataclass(frozen=True, slots=True)
class Usage(JsonValue):
    """Limits of the caller, and of the namespaces in which the caller may look at a model."""

    identity: str
    """Identity of the caller in the service's policy."""
    quotas: tuple[Quota, ...]
    """Limits of the caller, and of the namespaces in which the caller may look at a model; empty if there are none."""
