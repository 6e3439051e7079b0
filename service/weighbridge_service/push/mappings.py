"""Mappings of images in other processes: who may have which region mapped, and asking them to unmap it."""

from __future__ import annotations

import threading
from typing import Protocol

from weighbridge_storage.memory.regions import Region


class MappingHolder(Protocol):
    """A process that may have regions mapped."""

    def recall(self, region: Region) -> None:
        """Ask it to unmap a region, unless it is writing a version there. Waits for nothing."""


class Mappings:
    """The processes that may have regions mapped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[MappingHolder] = set()

    def add(self, holder: MappingHolder) -> None:
        """From now on, ask this process, too."""
        with self._lock:
            self._holders.add(holder)

    def remove(self, holder: MappingHolder) -> None:
        """It has gone."""
        with self._lock:
            self._holders.discard(holder)

    def recall(self, region: Region) -> None:
        """Ask all that may have a region mapped, and do not write a version there, to unmap it. Waits for nothing."""
        for holder in self._all():
            holder.recall(region)

    def _all(self) -> list[MappingHolder]:
        with self._lock:
            return list(self._holders)
