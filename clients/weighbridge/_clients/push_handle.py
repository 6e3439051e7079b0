"""Handle of a push: its progress and its cost."""

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
    """Cost of one rank's push.

    Attributes:
        held_seconds: seconds for which `push` blocked the rank. If weights and a training state are copied together,
            the time of each counts from its own beginning.
        copy_seconds: seconds that copying the shards took. They are part of `held_seconds`, unless a thread copied
            while the rank continued (from host memory, or until a step).
        stream_bytes: bytes that this rank pushed.
        stream_seconds: seconds that delivering the bytes took, while the rank continued.
        lane: ``local``, ``grpc``, or ``mixed`` if a replica on another machine writes some of the files.
        lane_reason: reason why the lane was not ``local``, if that was requested.
        local_bytes: number of bytes that were written to shared memory; the others were sent over gRPC.
        cast_tensors: number of tensors that were cast to the model's dtypes.
        widened_tensors: number of these tensors whose cast is exact, because the model's dtype can represent all values
            of the tensor's dtype.
        nonfinite_elements: number of elements that this rank pushed and that are NaN or infinite in the model's dtypes.
            An element that occurs twice in the version's files counts twice. None if the push has a custom source that
            does not count them.
        nonfinite_tensors: the first 20 tensors with such elements, by this rank's names, with their counts.
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
    """A push that is being delivered. The shards have been copied, so the rank may change its tensors, unless the copy
    is deferred (``until``).

    Attributes:
        model: the model.
        number: number of the version.
        stream_bytes: bytes that this rank pushes.
        training: the push of the training state that follows, which succeeds or fails independently; None if there is
            none.
        skipped: the error for which the push was skipped, with ``on_failure="warn"``; `report` and `wait` raise it.
            None if the push was made.
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
        """Return the handle of a push that failed in the call, with ``on_failure="warn"``."""
        report: Future[PushReport] = Future()
        report.set_exception(error)
        handle = cls(connection, model, 0, 0, report)
        handle.skipped = error
        return handle

    def copied(self, timeout: float | None = None) -> bool:
        """Wait until the rank may change its tensors. Returns at once, except for a push with ``until``.

        Args:
            timeout: seconds; None waits without limit.

        Returns:
            Whether the rank may change its tensors; True also if copying them failed.
        """
        return self._copying is None or self._copying.ended.wait(timeout)

    def __repr__(self) -> str:
        if self.skipped is not None:
            return f"<PushHandle {self.model}: skipped, {self.skipped}>"
        how = "delivered" if self.done else "on its way"
        return f"<PushHandle {self.model}@{self.number}: {self.stream_bytes} bytes, {how}>"

    @property
    def sealed(self) -> bool:
        """Whether this rank has sealed its push, so that its part of the version is complete."""
        return self._held_seal is None and self.done and self._report.exception() is None

    def seal(self) -> None:
        """Seal a rank whose seal was held. Otherwise the version cannot become visible.

        Does nothing if the rank is already sealed.

        Raises:
            WeighbridgeError: this rank's push failed, or the version failed or was aborted.
        """
        self.report()
        if self._held_seal is not None:
            self._held_seal()
            self._held_seal = None

    @property
    def done(self) -> bool:
        """Whether this rank's push has failed, or its bytes have arrived and it is sealed (if its seal is not held)."""
        return self._report.done()

    @property
    def closed(self) -> bool:
        """Whether the client was closed, so that `wait` no longer works."""
        return self._connection.closed

    def report(self, timeout: float | None = None) -> PushReport:
        """Wait until this rank has sealed its push, or until its bytes have arrived if its seal is held.

        Return the cost of its push.

        Raises:
            WeighbridgeError: the push failed.
            DeadlineExceeded: the rank was not sealed within ``timeout`` seconds.

        Examples:
            >>> report = trainer.push_state_dict("acme/smol", model, step=200).report()
            >>> report.lane, report.stream_bytes, report.nonfinite_elements
            ('grpc', 78592, 0)
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
            timeout: seconds; None waits without limit.
            on_progress: called repeatedly with the current state of the version, and at the end.

        Raises:
            VersionFailed: the version cannot be completed; lists the missing ranks or tensors.
            WeighbridgeError: this rank's push failed.
            DeadlineExceeded: the version did not reach the state within ``timeout`` seconds.

        The method waits for a held version (`Version.held`) like for any other. Without ``on_progress`` it logs a
        warning for a held version.

        Examples:
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200)
            >>> ready = handle.wait("ready", timeout=60)
            >>> ready.state.visible
            True
            >>> print(handle.wait(timeout=60))
            acme/smol@2 (durable, step 200)
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
