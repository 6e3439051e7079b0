"""Layouts that the service has sent to this client and need not send again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weighbridge._core.layouts import Layout
from weighbridge._core.lru import Cache
from weighbridge.errors import DataLoss

_MOST_PLACEMENTS = 250_000
"""Limit on the placements of all kept layouts. The layouts of a model with 70,000 tensors take about 50 MB."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout, and its digest by the service."""

    digest: str
    layout: Layout


class KnownLayouts:
    """Cache of the layouts that were requested last. Thread-safe.

    Args:
        most_placements: largest number of placements of all kept layouts.
    """

    def __init__(self, most_placements: int = _MOST_PLACEMENTS) -> None:
        self._most_placements = most_placements
        self._kept: Cache[KnownLayout] = Cache(most_placements, lambda known: len(known.layout.placements))

    def find(self, asked: Hashable) -> KnownLayout | None:
        """The layout that the service last sent for a request; None if it is not kept."""
        return self._kept.get(asked)

    def keep(self, asked: Hashable, digest: str, layout: Layout) -> None:
        """Keep a layout for the next such request, unless it has no digest or is too large."""
        if digest and len(layout.placements) <= self._most_placements:
            self._kept.put(asked, KnownLayout(digest, layout))


def same_as(known: KnownLayout | None, digest: str) -> Layout:
    """The known layout to which the service refers by its digest.

    Raises:
        DataLoss: this client does not have the layout.
    """
    if known is None or known.digest != digest:
        raise DataLoss("the service referred to a layout that this client does not have")
    return known.layout
