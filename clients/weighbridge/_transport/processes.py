"""Process that connections belong to: gRPC's do not work in a process that was forked after they were made, where calls get no answer."""

from __future__ import annotations

import os

from weighbridge.errors import FailedPrecondition


class OwnProcess:
    """The process that used a client first."""

    def __init__(self) -> None:
        self._id = 0

    def check(self) -> None:
        """Take this process for the client's own if it is the first; to be called before any lock is taken, which another thread may have held at the fork.

        Raises:
            FailedPrecondition: another process used it before, from which this one was forked.
        """
        here = os.getpid()
        if self._id not in (0, here):
            raise FailedPrecondition(
                f"this client was used in process {self._id}, from which process {here} was forked: its connections do not work here",
                fix="make a client in each process, after the fork, or start processes by spawn or forkserver",
            )
        self._id = here
