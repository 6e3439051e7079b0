"""Layouts that the service has sent to this client and need not send again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weighbridge._core.layouts import Layout
from weighbridge._core.lru import Cache
from weighbridge.errors import DataLoss

_MOST_PLACEMENTS = 250_000
"""Maximum number of placements in all cached layouts. The layouts of a model with 70,000 tensors need about 50 MB."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout, and the digest that the service computed of it."""

    digest: str
    layout: Layout


class KnownLayouts:
    """Cache of the most recently requested layouts. Thread-safe.

    Args:
        most_placements: maximum number of placements in all cached layouts.
    """

    def __init__(self, most_placements: int = _MOST_PLACEMENTS) -> None:
        self._most_placements = most_placements
        self._kept: Cache[KnownLayout] = Cache(most_placements, lambda known: len(known.layout.placements))

    def find(self, asked: Hashable) -> KnownLayout | None:
        """Return the layout that the service last sent for a request; None if it is not in the cache."""
        return self._kept.get(asked)

    def keep(self, asked: Hashable, digest: str, layout: Layout) -> None:
        """Cache a layout for the next request of this kind, unless it has no digest or is too large."""
        if digest and len(layout.placements) <= self._most_placements:
            self._kept.put(asked, KnownLayout(digest, layout))


def same_as(known: KnownLayout | None, digest: str) -> Layout:
    """Return the known layout to which the service refers by its digest.

    Raises:
        DataLoss: this client does not have the layout.
    """
    if known is None or known.digest != digest:
        raise DataLoss("the service referred to a layout that this client does not have")
    return known.layout
