"""Limits of a service's policy, and their usage."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

__all__ = ["Quota", "Usage"]

QUOTA_STREAMS = "streams"
"""Limit on an identity's concurrent streams of weights."""
QUOTA_BYTES_PER_SECOND = "bytes_per_second"
"""Limit on the bytes per second of all streams of an identity."""
QUOTA_VERSIONS_PER_HOUR = "versions_per_hour"
"""Limit on the versions that an identity opens in an hour."""
QUOTA_STORED = "stored"
"""Limit on the bytes of all versions of a namespace."""


@dataclass(frozen=True, slots=True)
class Quota(JsonValue):
    """A limit and its usage."""

    kind: str
    """`streams`, `bytes_per_second` and `versions_per_hour` are limits of an identity; `stored`, in bytes, is a limit
    of a namespace.
    """
    of: str
    """The identity or the namespace."""
    used: int
    """Usage.

    For `stored` it is the usage at all replicas together; for the other kinds it is the usage at the replica that
    responds.
    """
    limit: int
    """Maximum usage that the policy allows."""


@dataclass(frozen=True, slots=True)
class Usage(JsonValue):
    """Limits of the caller, and of the namespaces in which the caller may look at a model."""

    identity: str
    """Identity of the caller in the service's policy."""
    quotas: tuple[Quota, ...]
    """Limits of the caller, and of the namespaces in which the caller may look at a model; empty if the policy does not
    set limits for them.
    """
