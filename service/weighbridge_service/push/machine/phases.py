"""Phases of a push, and which may follow which."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Phase(enum.Enum):
    """Where a push is."""

    OPEN = "open"
    """The number is given; not all ranks have declared."""
    PLANNED = "planned"
    """All ranks have declared and the plan is made; there is no image yet."""
    FILLING = "filling"
    """Bytes arrive."""
    SEALED = "sealed"
    """All bytes of this replica's files are here, nobody can write to them, and its ranks have sealed."""
    READY = "ready"
    """All bytes of all files are in images of live replicas, and the version was not given up meanwhile."""
    VERIFIED = "verified"
    """The digests of all files were made from the images, and a sample was compared with what ranks sent."""
    PUBLISHED = "published"
    """Part of history."""
    HANDED_OVER = "handed over"
    """Another replica has all bytes that were here and goes on with them: this one leaves."""
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
"""All transitions there are. PUBLISHED follows on earlier phases where another replica has published: it does so only when every
owner of files has handed in what it has digested, compared and uploaded."""
INCOMPLETE = frozenset((Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED))
BEFORE_SEALED = INCOMPLETE - {Phase.SEALED}
VISIBLE = frozenset((Phase.READY, Phase.VERIFIED))
FINAL = frozenset((Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED, Phase.ABORTED))
