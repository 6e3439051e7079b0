"""Layouts that the service has sent to this client, and need not send again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weighbridge._core.layouts import Layout
from weighbridge._core.lru import Cache
from weighbridge.errors import DataLoss

_MOST_PLACEMENTS = 250_000
"""Those of a model with 70,000 tensors take some 50 MB."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout, and what the service calls it."""

    digest: str
    layout: Layout


class KnownLayouts:
    """The layouts that were asked for last. Thread-safe.

    Args:
        most_placements: of all layouts that are kept.
    """

    def __init__(self, most_placements: int = _MOST_PLACEMENTS) -> None:
        self._most_placements = most_placements
        self._kept: Cache[KnownLayout] = Cache(most_placements, lambda known: len(known.layout.placements))

    def find(self, asked: Hashable) -> KnownLayout | None:
        """What came the last time that this was asked for, if it is still there."""
        return self._kept.get(asked)

    def keep(self, asked: Hashable, digest: str, layout: Layout) -> None:
        """Have a layout for the next time, unless it has no name, or is too large."""
        if digest and len(layout.placements) <= self._most_placements:
            self._kept.put(asked, KnownLayout(digest, layout))


def same_as(known: KnownLayout | None, digest: str) -> Layout:
    """The layout that the service has not sent again.

    Raises:
        DataLoss: it referred to one that this client does not have.
    """
    if known is None or known.digest != digest:
        raise DataLoss("the service referred to a layout that this client does not have")
    return known.layout
