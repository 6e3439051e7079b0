"""Verbs of access control: what a caller must be allowed to do."""

from __future__ import annotations

from enum import StrEnum


class Verb(StrEnum):
    """What somebody wants to do. Its value is its name in a scope."""

    PROBE = "probe"
    """Ask whether the service lives; whoever reaches it may."""
    LOOK = "look"
    """Look at models, versions and refs. Every scope for a model has it in it, for that model."""
    PULL = "pull"
    """Read weights."""
    PUSH = "push"
    """Register a model, bring a version, or give one up."""
    TAG = "tag"
    """Move and delete tags."""
    APPROVE = "approve"
    """Hold versions no longer that are held, and carry out what others have asked for a protected ref."""
    SIGN = "sign"
    """Put signatures to versions."""
    MANAGE = "manage"
    """Delete models and versions, say what is kept and what is held, and export."""
    OBSERVE = "observe"
    """Read metrics and what the service says of its memory."""
    REPLICATE = "replicate"
    """Take part in the service as a replica."""
