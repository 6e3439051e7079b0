"""When may a rank's process write to a version's image itself, and has it let go of it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weighbridge.errors import FailedPrecondition, VersionFailed
from weighbridge_service.filling import Filling
from weighbridge_service.lifecycle import Lifecycle
from weighbridge_service.push.push_plan import PreparedPush
from weighbridge_storage.images import Image, Lease
from weighbridge_storage.regions import Region

_LET_GO_SECONDS = 5.0
"""How long processes that were asked to let go of memory may take for it: they unmap it in milliseconds."""
_LET_GO_PAUSE = 0.002


@dataclass(frozen=True, slots=True)
class LentImage:
    """An image that a rank's process writes to.

    Attributes:
        image: the image.
        lease: keeps it from being used for something else; to be released at the end.
        prepared: where the bytes of the rank's stream belong.
    """

    image: Image
    lease: Lease
    prepared: PreparedPush


class Lending:
    """Lends the image of one version to processes of its ranks. Safe to use from many threads.

    Args:
        lifecycle: the version's.
        image: what is lent.
        filling: what has come to it.
        recall: asks processes that were lent a region, and do not write to it for this version, to let go of it.
    """

    def __init__(
        self, lifecycle: Lifecycle, image: Image, filling: Filling, recall: Callable[[Region], None]
    ) -> None:
        self._lifecycle = lifecycle
        self._image = image
        self._filling = filling
        self._recall = recall

    def lend(self, rank: int) -> LentImage:
        """Let a rank's process write its stream to the image itself.

        Raises:
            FailedPrecondition: all of the stream has come, files are complete already, or other replicas of the service have a part
                in the version, so that the rank's bytes do not all belong here.
        """
        name, agreed = self._lifecycle.name, self._filling.agreed
        with self._lifecycle.changed:
            if self._filling.is_whole(rank):
                raise FailedPrecondition(f"all bytes of rank {rank} of {name} have come")
            if not agreed.alone:
                raise FailedPrecondition(f"{name} is received by several replicas of the service")
            self._filling.arrivals.lend(rank)
            return LentImage(self._image, self._image.lease(), agreed.prepared)

    def give_back(self, rank: int) -> None:
        """A rank's process has said that it is done, or has ended."""
        with self._lifecycle.changed:
            self._filling.arrivals.give_back(rank)

    def look_again(self) -> None:
        """Show files that were held back, if who could still write to them has let go; ask those to let go who have not."""
        region = self._held_elsewhere()
        if region is not None:
            # whoever was lent it ahead of the version may not be one of its ranks, and there may be no rank that waits
            self._recall(region)

    def wait_let_go(self) -> None:
        """When all bytes are here, wait until no process can write to the image.

        Raises:
            VersionFailed: one still can, though all that were lent it have said that they are done: the version is to be given up.
        """
        region = self._held_elsewhere()
        if region is None:
            return
        self._recall(region)
        deadline = time.monotonic() + _LET_GO_SECONDS
        while self._held_elsewhere() is not None:
            if time.monotonic() > deadline:
                raise VersionFailed(
                    f"{self._lifecycle.name} was given up: a process can still write to its memory, although all that were "
                    "lent it have said that they are done",
                    fix="close every mapping of the memory, and its descriptor, before the end of the loan; push the step "
                    "again",
                )
            time.sleep(_LET_GO_PAUSE)

    def _held_elsewhere(self) -> Region | None:
        """Let those who wait have the files that are complete; gives the image's region if all bytes are here, all that it was lent
        have given it back, and a process can still write to it."""
        arrivals = self._filling.arrivals
        with self._lifecycle.changed:
            if not self._lifecycle.is_receiving:
                return None
            if arrivals.show():
                self._lifecycle.changed.notify_all()
            held_back = arrivals.held_back and arrivals.all_here and not arrivals.is_lent
            return self._image.region if held_back else None
