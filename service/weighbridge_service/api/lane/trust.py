"""Trust in writers of the local lane: to whose processes memory is lent for writing.

Trust means: such a process may write to a version's memory as long as it has not said that it is done, keeps that memory mapped afterwards, and is believed
to leave it alone then. Nothing else could be relied on: the kernel can say who still has memory mapped, and not who has pinned its pages, with
io_uring or for a device, and can write to them later. So memory is lent for writing only to processes of the service's own user, which could open
its memory in other ways, and of users that the operator names: trust only whom you would let run as the service's user. All others push by
gRPC, whose bytes the service itself puts in their place. Reading is no question of trust: who reads gets a descriptor that cannot be written through.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weighbridge.errors import FailedPrecondition, InvalidArgument

_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


@dataclass(frozen=True, slots=True)
class Writers:
    """Users whose processes are lent memory for writing.

    Attributes:
        own: the service's user id.
        others: ids of users that are trusted besides.
    """

    own: int
    others: frozenset[int]

    @staticmethod
    def of(others: Iterable[int]) -> Writers:
        """The user of this process, and others. Raises InvalidArgument if one of them stands for any number of users."""
        trusted = frozenset(others)
        with suppress(OSError, ValueError):
            overflow = int(_OVERFLOW.read_text("ascii"))
            if overflow in trusted:
                raise InvalidArgument(
                    f"user {overflow} cannot be trusted: it is what all users of other user namespaces look like",
                    fix="run the trainer in the service's user namespace, as a user of its own",
                )
        return Writers(os.getuid(), trusted)

    def check(self, uid: int) -> None:
        """Raise FailedPrecondition if no memory is lent for writing to processes of a user."""
        if uid == self.own or uid in self.others:
            return
        raise FailedPrecondition(
            f"memory is lent for writing to processes of user {self.own}, as whom the service runs, and of users that it was told to trust; "
            f"this one runs as user {uid}",
            fix=f"run it as user {self.own}, or start the service with --lane-trust-uid {uid} if that user may change versions",
        )
