"""Handle of a push: how it is getting on, and what it has cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from weighbridge._clients.calls import version_calls
from weighbridge._clients.connection import Connection
from weighbridge._clients.copying.copies import Copying
from weighbridge._core.resources import Version, VersionState, why_held
from weighbridge.errors import DeadlineExceeded

__all__ = ["PushHandle", "PushReport"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one rank's push cost.

    Attributes:
        held_seconds: how long `push` kept the rank; of weights and a training state that are copied at once, each from its own beginning.
        copy_seconds: of these, copying the shards out; behind the rank's back, if they were copied to host memory first or until a step.
        stream_bytes: bytes this rank pushed.
        stream_seconds: how long they were on their way, behind the rank's back.
        lane: how they went: ``local``, ``grpc``, or ``mixed`` if some belong to files that a replica of the service on another machine
            writes.
        lane_reason: why they did not go by ``local``, if that was wanted.
        local_bytes: how many of them were written to shared memory; the others went by gRPC.
        cast_tensors: of how many tensors the bytes were cast to the model's dtypes on the way.
        widened_tensors: how many of these casts are exact: to a dtype that has all numbers of the tensor's own.
        nonfinite_elements: how many of the elements that this rank pushed are NaN or infinite in the model's dtypes, an element that the
            version's files have twice counted twice. None if the source of a push of its own does not count them.
        nonfinite_tensors: the names of the first 20 tensors that have any, as this rank calls them, with their counts.
    """

    held_seconds: float
    copy_seconds: float
    stream_bytes: int
    stream_seconds: float
    lane: str
    lane_reason: str
    local_bytes: int
    cast_tensors: int = 0
    widened_tensors: int = 0
    nonfinite_elements: int | None = 0
    nonfinite_tensors: tuple[tuple[str, int], ...] = ()


class PushHandle:
    """A push on its way. The shards have been copied out, unless that was put off: the rank may change its tensors.

    Attributes:
        model: the model.
        number: the version's number.
        stream_bytes: bytes this rank pushes.
        training: the push of the training state behind it, which succeeds or fails by itself; None if there is none.
        skipped: why nothing was pushed, with ``on_failure="warn"``; `report` and `wait` raise it. None of a push that was made.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        number: int,
        stream_bytes: int,
        report: Future[PushReport],
        seal: Callable[[], None] | None = None,
        copying: Copying | None = None,
    ) -> None:
        self.model = model
        self.number = number
        self.stream_bytes = stream_bytes
        self.training: PushHandle | None = None
        self.skipped: Exception | None = None
        self._connection = connection
        self._report = report
        self._held_seal = seal
        self._copying = copying

    @classmethod
    def of_skipped(cls, connection: Connection, model: str, error: Exception) -> PushHandle:
        """The handle of a push that failed in the call, and was not to raise."""
        report: Future[PushReport] = Future()
        report.set_exception(error)
        handle = cls(connection, model, 0, 0, report)
        handle.skipped = error
        return handle

    def copied(self, timeout: float | None = None) -> bool:
        """Wait until the rank may change its tensors: at once, but for a push with ``until``. Whether it may; if it failed to copy them, too.

        Args:
            timeout: seconds; None waits as long as it takes.
        """
        return self._copying is None or self._copying.ended.wait(timeout)

    def __repr__(self) -> str:
        if self.skipped is not None:
            return f"<PushHandle {self.model}: skipped, {self.skipped}>"
        how = "delivered" if self.done else "on its way"
        return f"<PushHandle {self.model}@{self.number}: {self.stream_bytes} bytes, {how}>"

    @property
    def sealed(self) -> bool:
        """Whether this rank has sealed: its part of the version is complete."""
        return self._held_seal is None and self.done and self._report.exception() is None

    def seal(self) -> None:
        """Seal a rank whose seal was held: without it the version cannot become visible. Nothing happens if it is sealed already.

        Raises:
            WeighbridgeError: this rank's push failed, or the version was given up.
        """
        self.report()
        if self._held_seal is not None:
            self._held_seal()
            self._held_seal = None

    @property
    def done(self) -> bool:
        """Whether this rank's bytes have arrived and it has sealed unless its seal is held, or has failed to."""
        return self._report.done()

    @property
    def closed(self) -> bool:
        """Whether the client was closed: the version can be waited for no longer."""
        return self._connection.closed

    def report(self, timeout: float | None = None) -> PushReport:
        """Wait until this rank has sealed, or its bytes have arrived if its seal is held; what its push cost.

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
            on_progress: is called with the version as it stands now and then, and at the end.

        Raises:
            VersionFailed: it cannot be completed; lists what is missing.
            WeighbridgeError: this rank's push failed.
            DeadlineExceeded: not within ``timeout`` seconds.

        A version that is held (`Version.held`) is waited for like any other; the log says so unless ``on_progress`` sees it.
        """
        if on_progress is None or self.skipped is not None:
            started = time.monotonic()
            self.report(timeout)
            left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
            return self._wait(until, left, None)

        def watched(version: Version) -> None:
            if self.done:
                self.report()  # raises if this rank's push has failed
            on_progress(version)

        return self._wait(until, timeout, watched)

    def _wait(
        self, until: VersionState | str, timeout: float | None, on_progress: Callable[[Version], None] | None
    ) -> Version:
        waiting = version_calls.wait_for(self.model, self.number, VersionState(until), timeout, on_progress)
        version = self._connection.run(waiting)
        if version.held and on_progress is None:
            log.warning("%s", why_held(version))
        return version
