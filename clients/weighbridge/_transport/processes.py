"""Process that connections belong to.

A gRPC connection does not work in a process that was forked after it was opened: calls there get no response.
"""

from __future__ import annotations

import os

from weighbridge.errors import FailedPrecondition


class OwnProcess:
    """The first process that used a client."""

    def __init__(self) -> None:
        self._id = 0

    def check(self) -> None:
        """Record this process if it is the first.

        Call it before any lock is taken: another thread may have held the lock at the fork.

        Raises:
            FailedPrecondition: this process was forked from the first one.
        """
        here = os.getpid()
        if self._id not in (0, here):
            raise FailedPrecondition(
                (
                    f"this client was used in process {self._id}, from which process {here} was "
                    "forked: its connections do not work here"
                ),
                fix="make a client in each process, after the fork, or start processes by spawn or forkserver",
            )
        self._id = here
