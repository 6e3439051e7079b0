"""Phases of a push, and the transitions between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Phase(enum.Enum):
    """Phase of a push."""

    OPEN = "open"
    """The version has its number; not all ranks have declared."""
    PLANNED = "planned"
    """All ranks have declared and the plan is made; there is no image yet."""
    FILLING = "filling"
    """Bytes arrive."""
    SEALED = "sealed"
    """All bytes of this replica's files have arrived, no process can write to them, and its ranks are sealed."""
    READY = "ready"
    """All bytes of all files are in images of live replicas, and the version was not given up meanwhile."""
    VERIFIED = "verified"
    """The digests of all files were computed from the images, and a sample of the received pieces agrees with the
    images.
    """
    PUBLISHED = "published"
    """Part of history."""
    HANDED_OVER = "handed over"
    """Another replica has all bytes of this one, which stops, and continues the push."""
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.OPEN: frozenset((Phase.PLANNED, Phase.FAILED, Phase.ABORTED)),
    Phase.PLANNED: frozenset((Phase.FILLING, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.FILLING: frozenset((Phase.SEALED, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.SEALED: frozenset((Phase.READY, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.READY: frozenset((Phase.VERIFIED, Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED)),
    Phase.VERIFIED: frozenset((Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED)),
    Phase.PUBLISHED: frozenset(),
    Phase.HANDED_OVER: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.ABORTED: frozenset(),
}
"""All transitions. PUBLISHED follows earlier phases when another replica has published, which it does only after every
owner of files has digested, compared, uploaded and handed in its own."""
INCOMPLETE = frozenset((Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED))
BEFORE_SEALED = INCOMPLETE - {Phase.SEALED}
VISIBLE = frozenset((Phase.READY, Phase.VERIFIED))
FINAL = frozenset((Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED, Phase.ABORTED))
