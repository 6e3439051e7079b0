"""Layouts that the service has sent to this client, and need not send again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from weighbridge.errors import DataLoss
from weighbridge.layouts import Layout

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
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, KnownLayout] = OrderedDict()
        self._placements = 0

    def find(self, asked: Hashable) -> KnownLayout | None:
        """What came the last time that this was asked for, if it is still there."""
        with self._lock:
            found = self._kept.get(asked)
            if found is not None:
                self._kept.move_to_end(asked)
            return found

    def keep(self, asked: Hashable, digest: str, layout: Layout) -> None:
        """Have a layout for the next time, unless it has no name, or is too large."""
        if not digest or len(layout.placements) > _MOST_PLACEMENTS:
            return
        with self._lock:
            self._drop(asked)
            self._kept[asked] = KnownLayout(digest, layout)
            self._placements += len(layout.placements)
            while self._placements > _MOST_PLACEMENTS:
                self._drop(next(iter(self._kept)))

    def _drop(self, asked: Hashable) -> None:
        dropped = self._kept.pop(asked, None)
        if dropped is not None:
            self._placements -= len(dropped.layout.placements)


def same_as(known: KnownLayout | None, digest: str) -> Layout:
    """The layout that the service has not sent again.

    Raises:
        DataLoss: it counts on one that is not known here.
    """
    if known is None or known.digest != digest:
        raise DataLoss("the service counts on a layout that is not known here")
    return known.layout
