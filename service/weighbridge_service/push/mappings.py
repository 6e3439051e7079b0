"""Mappings of images in other processes: the processes that may have a region mapped, and requests to unmap it."""

from __future__ import annotations

import threading
from typing import Protocol

from weighbridge_storage.memory.regions import Region


class MappingHolder(Protocol):
    """Process that may have regions mapped."""

    def recall(self, region: Region) -> None:
        """Ask the process to unmap a region, unless it is writing a version there. Does not wait."""


class Mappings:
    """Processes that may have regions mapped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[MappingHolder] = set()

    def add(self, holder: MappingHolder) -> None:
        """Add a process, which `recall` asks from now on."""
        with self._lock:
            self._holders.add(holder)

    def remove(self, holder: MappingHolder) -> None:
        """Remove a process, which has disconnected."""
        with self._lock:
            self._holders.discard(holder)

    def recall(self, region: Region) -> None:
        """Ask all processes to unmap a region, except those that are writing a version there. Does not wait."""
        for holder in self._all():
            holder.recall(region)

    def _all(self) -> list[MappingHolder]:
        with self._lock:
            return list(self._holders)
