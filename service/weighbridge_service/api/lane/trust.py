"""Trust in writers of the local lane: the users whose processes may write to granted memory.

A trusted process may write to a version's memory until it reports that it is done. It keeps the memory mapped
afterwards, and the service relies on it not to write any more. The service cannot check this. The kernel reports which
processes have mapped the memory, but not which processes have pinned its pages, with io_uring or for a device, and
could write to them later. So the service grants memory for writing only to processes of its own user, which could
access its memory in other ways as well, and to processes of users that the operator names. Trust only users that you
would allow to run processes as the service's user. All other processes push over gRPC, and the service itself writes
the bytes. Reading does not require trust, because a reader's descriptor does not allow writing.
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
    """Users whose processes may write to granted memory.

    Attributes:
        own: user id of the service.
        others: user ids of further trusted users.
    """

    own: int
    others: frozenset[int]

    @staticmethod
    def of(others: Iterable[int]) -> Writers:
        """The user of this process, and others.

        Raises InvalidArgument if one of them is the overflow user id, which many users may share.
        """
        trusted = frozenset(others)
        with suppress(OSError, ValueError):
            overflow = int(_OVERFLOW.read_text("ascii"))
            if overflow in trusted:
                raise InvalidArgument(
                    f"user {overflow} cannot be trusted: all users of other user namespaces appear as this user",
                    fix="run the trainer in the service's user namespace, as a user of its own",
                )
        return Writers(os.getuid(), trusted)

    def check(self, uid: int) -> None:
        """Raise FailedPrecondition if processes of a user may not write to granted memory."""
        if uid == self.own or uid in self.others:
            return
        raise FailedPrecondition(
            "the service grants memory for writing only to processes of its own user "
            f"{self.own} and of users that it trusts; "
            f"this one runs as user {uid}",
            fix=(
                f"run it as user {self.own}, or start the service with --lane-trust-uid {uid} if "
                "that user may change versions"
            ),
        )
