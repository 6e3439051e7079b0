"""Handle of a push: how it is getting on, and what it has cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weighbridge.errors import DeadlineExceeded
from weighbridge.resources import Version, VersionState

if TYPE_CHECKING:
    from weighbridge.client import Client


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one rank's push cost.

    Attributes:
        held_seconds: how long `push` kept the rank.
        copy_seconds: of these, copying the shards out.
        stream_bytes: bytes this rank pushed.
        stream_seconds: how long they were on their way, behind the rank's back.
        lane: how they went: ``local``, ``grpc``, or ``mixed`` if some belong to files that a replica of the service on another machine
            writes.
        lane_reason: why they did not go by ``local``, if that was wanted.
        local_bytes: how many of them were written to shared memory; the others went by gRPC.
    """

    held_seconds: float
    copy_seconds: float
    stream_bytes: int
    stream_seconds: float
    lane: str
    lane_reason: str
    local_bytes: int


class PushHandle:
    """A push on its way. The shards have been copied out: the rank may change its tensors.

    Attributes:
        model: the model.
        number: the version's number.
        stream_bytes: bytes this rank pushes.
    """

    def __init__(self, client: Client, model: str, number: int, stream_bytes: int) -> None:
        self.model = model
        self.number = number
        self.stream_bytes = stream_bytes
        self._client = client
        self._report: Future[PushReport] = Future()

    @property
    def done(self) -> bool:
        """Whether this rank's bytes have arrived and it has sealed, or has failed to."""
        return self._report.done()

    def report(self, timeout: float | None = None) -> PushReport:
        """Wait until this rank has sealed; what its push cost.

        Raises:
            WeighbridgeError: the push failed.
            DeadlineExceeded: not sealed within ``timeout`` seconds.
        """
        try:
            return self._report.result(timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.model}@{self.number}: this rank had not sealed within {timeout} s"
            ) from error

    def wait(
        self,
        until: VersionState | str = VersionState.DURABLE,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Version], None] | None = None,
    ) -> Version:
        """Wait for the version.

        Args:
            until: ``ready`` (engines can pull it), ``verified`` or ``durable`` (in the object store).
            timeout: seconds; None waits as long as it takes.
            on_progress: is called with the version as it stands now and then.

        Raises:
            VersionFailed: it cannot be completed; lists what is missing.
            WeighbridgeError: this rank's push failed.
            DeadlineExceeded: not within ``timeout`` seconds.
        """
        if on_progress is None:
            started = time.monotonic()
            self.report(timeout)
            left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
            return self._client.wait_for(self.model, self.number, VersionState(until), timeout=left)

        def watched(version: Version) -> None:
            if self.done:
                self.report()  # raises if this rank's push has failed
            on_progress(version)

        return self._client.wait_for(
            self.model, self.number, VersionState(until), timeout=timeout, on_progress=watched
        )
