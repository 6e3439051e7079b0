"""Layouts that the service has sent to this client, and need not send again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weighbridge.errors import DataLoss
from weighbridge.layouts import Layout
from weighbridge.lru import Cache

_MOST_PLACEMENTS = 250_000
"""Over all layouts that are kept; those of a model with 70,000 tensors take some 50 MB."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout, and what the service calls it."""

    digest: str
    layout: Layout


class KnownLayouts:
    """The layouts that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._kept: Cache[KnownLayout] = Cache(_MOST_PLACEMENTS, lambda known: len(known.layout.placements))

    def find(self, asked: Hashable) -> KnownLayout | None:
        """What came the last time that this was asked for, if it is still there."""
        return self._kept.get(asked)

    def keep(self, asked: Hashable, digest: str, layout: Layout) -> None:
        """Have a layout for the next time, unless it has no name, or is too large."""
        if digest and len(layout.placements) <= _MOST_PLACEMENTS:
            self._kept.put(asked, KnownLayout(digest, layout))


def same_as(known: KnownLayout | None, digest: str) -> Layout:
    """The layout that the service has not sent again.

    Raises:
        DataLoss: it counts on one that is not known here.
    """
    if known is None or known.digest != digest:
        raise DataLoss("the service counts on a layout that is not known here")
    return known.layout
