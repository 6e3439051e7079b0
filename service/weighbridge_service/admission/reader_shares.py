"""Shares of readers in memory: images that no version needs any more, but that a reader on the local lane still maps.

A reader that keeps views of each version that it has pulled would fill all memory, and pushes would wait for it. So
each reader, identified by identity and user, has a share. A reader over its share is refused; it can still pull by
gRPC, into memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.quotas import may_have
from weighbridge_storage.memory.file_bytes import Place

_FOR_READERS = 2
"""All readers together may keep one part in this many, a half, of the budget of images."""


@dataclass(eq=False, slots=True)
class GrantedImages:
    """Images of one lease of a reader.

    Attributes:
        reader: identity and user of the reader.
        places: places of the images in memory.
        left_open: whether the lease has ended without the reader's confirmation that it has unmapped the images.
    """

    reader: str
    places: tuple[Place, ...]
    left_open: bool = False


class ReaderShares:
    """Shares of readers, and their leases. Thread-safe.

    Args:
        budget: bytes of memory for all images.
        spill: whether images may also be on disk. Then a reader may always keep one image while it leases the next, as
            an engine does for an update, however small the budget is: that blocks no push.
    """

    def __init__(self, budget: int, *, spill: bool) -> None:
        self._total = budget // _FOR_READERS
        self._always = 1 if spill else 0
        self._lock = threading.Lock()
        self._granted: set[GrantedImages] = set()

    def grant(self, reader: str, places: Iterable[Place]) -> GrantedImages:
        """Begin a lease of the images at these places. The caller ends it with `end`.

        Args:
            reader: identity and user of the reader, as in messages.
            places: places of the images; places in files do not count.

        Raises:
            ResourceExhausted: the reader keeps too many bytes that no version needs any more.
        """
        wanted = {place.key: place for place in places if place.lasting}
        with self._lock:
            self._granted = {
                granted
                for granted in self._granted
                if not granted.left_open or any(p.is_left_open() for p in granted.places)
            }
            mine = _kept(granted for granted in self._granted if granted.reader == reader)
            more = sum(place.nbytes for key, place in wanted.items() if key not in mine)
            held = sum(_kept(self._granted).values())
            if len(mine) > self._always and more and not may_have(self._total, held, sum(mine.values()), more):
                raise ResourceExhausted(
                    f"{reader} keeps {counted(len(mine), 'image')} of "
                    f"{readable_size(sum(mine.values()))} that no version needs any more; with "
                    f"{readable_size(more)} more, too little of the "
                    f"{readable_size(self._total)} that readers may keep would be left for "
                    "other readers",
                    fix=(
                        "copy or release the tensors that it keeps; pull over gRPC; or serve with "
                        "a larger --memory-budget"
                    ),
                )
            granted = GrantedImages(reader, tuple(wanted.values()))
            if wanted:
                self._granted.add(granted)
            return granted

    def end(self, granted: GrantedImages, *, left_open: bool = False) -> None:
        """End a lease.

        With ``left_open``, the reader may still map the images, and they keep counting until it does not.
        """
        with self._lock:
            granted.left_open = left_open
            if not left_open:
                self._granted.discard(granted)

    def kept(self) -> dict[str, int]:
        """Bytes by reader of images that only the reader keeps; readers that keep none are left out."""
        with self._lock:
            found = {
                reader: sum(_kept(each for each in self._granted if each.reader == reader).values())
                for reader in {granted.reader for granted in self._granted}
            }
        return {reader: nbytes for reader, nbytes in found.items() if nbytes}


def _kept(granted: Iterable[GrantedImages]) -> dict[str, int]:
    """Bytes of the images that only readers keep, by their keys; each image counts once."""
    return {place.key: place.nbytes for each in granted for place in each.places if place.kept_by_readers()}
