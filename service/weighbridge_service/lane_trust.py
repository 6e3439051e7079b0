"""Trust in writers of the local lane: to whose processes memory is lent for writing.

A version becomes ready once the kernel says that nobody else can write to its memory. It says that of descriptors and mappings, and not of pages
that a process has pinned: registered with io_uring or with a device for direct access, they can be written to after all are gone. So memory is lent
for writing only to those who are trusted to write to it while they push, and never after: processes of the service's own user, which could
open its memory in other ways, and of users that the operator names. All others push by gRPC, whose bytes the service itself puts in their
place. Reading is no question of trust: who reads gets a descriptor that cannot be written through.
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
