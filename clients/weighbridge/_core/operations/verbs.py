"""Verbs of access control: permissions that a caller needs."""

from __future__ import annotations

from enum import StrEnum


class Verb(StrEnum):
    """Permission that a call needs. The value is its name in a scope."""

    PROBE = "probe"
    """Ask whether the service is alive. Every caller may do this."""
    LOOK = "look"
    """Read the descriptions of models, versions and refs. Every scope for a model includes this verb for that model."""
    PULL = "pull"
    """Read weights."""
    PUSH = "push"
    """Register a model, push a version, or abort one."""
    TAG = "tag"
    """Move and delete tags."""
    APPROVE = "approve"
    """Release held versions, and approve requests of others to change a protected ref."""
    SIGN = "sign"
    """Add signatures to versions."""
    MANAGE = "manage"
    """Delete models and versions, set the rules by which versions are kept and held, and export."""
    OBSERVE = "observe"
    """Read metrics and the service's report of its memory."""
    REPLICATE = "replicate"
    """Take part in the service as a replica."""
