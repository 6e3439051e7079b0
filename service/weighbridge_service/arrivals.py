"""Which files of a version are complete, and can no longer be changed by anybody?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from weighbridge.errors import FailedPrecondition
from weighbridge_storage.regions import Region


class Arrivals:
    """The files that a replica puts together for one version. Not thread-safe: its user holds a lock.

    A file of which all bytes have come is only shown as filled when no other process can write to it any more: as long as memory
    is lent, will be lent to a further rank, or is still open somewhere although it should not be, it could be changed behind our
    back. So if memory is lent at all, files are shown when the bytes of all of them have come.

    Args:
        to_come: how many bytes go into each file.
        region: where they lie.

    Attributes:
        filled: the complete files, in the order in which they were.
    """

    def __init__(self, to_come: Mapping[str, int], region: Region) -> None:
        self._to_come = dict(to_come)
        self._region = region
        self._whole = [file for file, nbytes in to_come.items() if not nbytes]
        self._lent: Counter[int] = Counter()
        self._was_lent = False
        self.filled: list[str] = []
        self.show()

    def count(self, filled: Mapping[str, int]) -> bool:
        """So many bytes of each file have come; files that are not put together here do not matter. See `show`."""
        for file, nbytes in filled.items():
            if file in self._to_come:
                self._to_come[file] -= nbytes
                if not self._to_come[file]:
                    self._whole.append(file)
        return self.show()

    def show(self) -> bool:
        """Enter complete files into `filled` if nobody can change them any more; whether there are new ones."""
        early = self._was_lent and not self.all_here
        if not self._whole or early or self.is_lent or self.can_be_changed:
            return False
        self.filled += self._whole
        self._whole = []
        return True

    def lend(self, rank: int) -> None:
        """A rank's process is going to write to the files.

        Raises:
            FailedPrecondition: some of them are being published already, and must not change.
        """
        if self.filled:
            raise FailedPrecondition("files of the version are complete already, and must not be changed")
        self._was_lent = True
        self._lent[rank] += 1

    def give_back(self, rank: int) -> None:
        """It has said that it is done, or has ended."""
        self._lent[rank] -= 1

    @property
    def is_lent(self) -> bool:
        """Whether a rank's process is writing."""
        return any(self._lent.values())

    @property
    def can_be_changed(self) -> bool:
        """Whether another process can still write to the files, whatever it has said."""
        return self._region.written_elsewhere()

    @property
    def all_here(self) -> bool:
        """Whether the bytes of all files have come."""
        return not any(self._to_come.values())

    @property
    def held_back(self) -> bool:
        """Whether there are complete files that could still be changed."""
        return bool(self._whole)

    @property
    def complete(self) -> bool:
        """Whether all files are filled."""
        return len(self.filled) == len(self._to_come)
