"""Shares of readers in memory: images that no version needs any more, and that stay because a reader on the local lane looks at them.

A reader that keeps views of each version it has pulled would fill all memory, and pushes of others would wait for it. So each has a share,
counted by identity and user, and it is the reader that is refused: it can still pull by gRPC, into memory of its own.
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
"""The part of the budget of images that all readers may keep together: half."""


@dataclass(eq=False, slots=True)
class LentImages:
    """Images that a reader was lent together.

    Attributes:
        reader: who.
        places: where they lie.
        left_open: whether the loan has ended without the reader saying that it looks at them no more.
    """

    reader: str
    places: tuple[Place, ...]
    left_open: bool = False


class ReaderShares:
    """Shares of readers, and what each was lent. Thread-safe.

    Args:
        budget: bytes of memory for all images.
        spill: whether images may lie on disk, too. Then no push is stopped by a reader that keeps one image and is lent the next, as one does
            that updates an engine, however small the budget is.
    """

    def __init__(self, budget: int, *, spill: bool) -> None:
        self._total = budget // _FOR_READERS
        self._always = 1 if spill else 0
        self._lock = threading.Lock()
        self._lent: set[LentImages] = set()

    def lend(self, reader: str, places: Iterable[Place]) -> LentImages:
        """A reader is about to be lent what lies at these places; to be ended.

        Args:
            reader: identity and user, as people read them.
            places: those in files count for nothing.

        Raises:
            ResourceExhausted: it keeps too much that no version needs any more.
        """
        wanted = {place.key: place for place in places if place.lasting}
        with self._lock:
            self._lent = {
                lent
                for lent in self._lent
                if not lent.left_open or any(p.is_left_open() for p in lent.places)
            }
            mine = _kept(lent for lent in self._lent if lent.reader == reader)
            more = sum(place.nbytes for key, place in wanted.items() if key not in mine)
            held = sum(_kept(self._lent).values())
            if (
                len(mine) > self._always
                and more
                and not may_have(self._total, held, sum(mine.values()), more)
            ):
                raise ResourceExhausted(
                    f"{reader} keeps {counted(len(mine), 'image')} of {readable_size(sum(mine.values()))} that no version needs any more; with "
                    f"{readable_size(more)} more, too little of the {readable_size(self._total)} that readers may keep would be left to others",
                    fix="copy tensors that are kept, or let go of them; pull by gRPC; or serve with a larger --memory-budget",
                )
            lent = LentImages(reader, tuple(wanted.values()))
            if wanted:
                self._lent.add(lent)
            return lent

    def end(self, lent: LentImages, *, left_open: bool = False) -> None:
        """A loan has ended; with ``left_open``, its reader may still look at the images."""
        with self._lock:
            lent.left_open = left_open
            if not left_open:
                self._lent.discard(lent)

    def kept(self) -> dict[str, int]:
        """Bytes that each reader keeps and no version needs any more; those that keep none are left out."""
        with self._lock:
            found = {
                reader: sum(_kept(each for each in self._lent if each.reader == reader).values())
                for reader in {lent.reader for lent in self._lent}
            }
        return {reader: nbytes for reader, nbytes in found.items() if nbytes}


def _kept(lent: Iterable[LentImages]) -> dict[str, int]:
    """Bytes of the images that only readers keep, each once, by their keys."""
    return {place.key: place.nbytes for each in lent for place in each.places if place.kept_by_readers()}
