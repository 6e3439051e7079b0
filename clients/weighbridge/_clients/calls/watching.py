"""Watch of refs: the call that opens its stream, the versions received so far, and the time of the next retry.

No function here does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weighbridge._core.resources import RECEIVING, REF_LIVE, Version
from weighbridge._transport import wire
from weighbridge._transport.backoff import Backoff
from weighbridge.errors import InvalidArgument, Unavailable, WeighbridgeError
from weighbridge.v1 import model_service_pb2 as pb

_PAUSE_SECONDS = 0.5
"""Maximum pause between attempts to open the stream. It is short, because engines wait for new versions."""


@dataclass(frozen=True, slots=True)
class Watch:
    """State of a watch of refs.

    Attributes:
        refs: model and name of each ref.
        last: for each ref, the number of the version received last; 0 if none.
        backoff: backoff of the attempts to open the stream. Once the service has accepted the watch, attempts continue
            without limit.
        accepted: whether the service has accepted the watch.
    """

    refs: tuple[tuple[str, str], ...]
    last: tuple[int, ...]
    backoff: Backoff
    accepted: bool = False

    @staticmethod
    def begin(refs: Iterable[tuple[str, str]], retry_seconds: float) -> Watch:
        """Return a watch that has not received a version yet.

        Raises InvalidArgument if a ref is not a pair of model and name.
        """
        found = tuple(refs)
        for ref in found:
            if [type(part) for part in ref] != [str, str]:
                raise InvalidArgument(
                    f"{ref!r} is not a model with one of its refs",
                    fix='watch tuples such as ("acme/smol", "live")',
                )
        return Watch(found, (0,) * len(found), Backoff(retry_seconds, _PAUSE_SECONDS))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The refs for which no version has been received yet."""
        return tuple(ref for ref, last in zip(self.refs, self.last, strict=True) if not last and ref[1] != RECEIVING)

    @property
    def call(self) -> tuple[str, bytes, Callable[[bytes], tuple[int, Version]]]:
        """The call that opens the stream: its path, its request, and a function that decodes a response into the ref's
        index and its version.
        """
        there = zip(self.refs, self.last, strict=True)
        request = pb.WatchRefsRequest(refs=[_watched(*ref, last) for ref, last in there])
        return "/weighbridge.v1.ModelService/WatchRefs", request.SerializeToString(), _moved_ref

    def received(self, index: int, number: int) -> Watch:
        """Return the watch after it has received a version of the ref with this index."""
        last = (*self.last[:index], number, *self.last[index + 1 :])
        return replace(self.begun(), last=last)

    def begun(self) -> Watch:
        """Return the watch after the service has accepted it."""
        return replace(self, accepted=True, backoff=Backoff(math.inf, _PAUSE_SECONDS))

    def left(self, now: float) -> float | None:
        """Return the seconds left for attempts to open the stream; None if they are unlimited.

        `now` is a time of the monotonic clock.
        """
        return None if self.accepted else self.backoff.left(now)

    def failed(self, error: WeighbridgeError, *, closed: bool, now: float, jitter: float) -> tuple[float, Watch]:
        """Return the pause in seconds before the stream is opened again, and the watch that is opened then.

        Args:
            error: the error that ended the stream. It is raised if no further attempt is allowed.
            closed: whether the client has been closed.
            now: seconds of the monotonic clock.
            jitter: random number from 0 to 1.
        """
        if isinstance(error, Unavailable) and not self.accepted:
            retry = self.backoff.after_error(error, now, jitter)
        else:  # the service was reachable before, so it will probably return
            retry = self.backoff.after_failure(now, jitter)
        if closed or retry is None:
            raise error
        return retry.pause, replace(self, backoff=retry.backoff)


def _watched(model: str, ref: str, last: int) -> pb.WatchedRef:
    if ref == RECEIVING:
        # the service checks access to the ref that the version may become
        return pb.WatchedRef(model=model, ref=REF_LIVE, receiving=True, after=last)
    return pb.WatchedRef(model=model, ref=ref, after=last)


def _moved_ref(raw: bytes) -> tuple[int, Version]:
    response = pb.WatchRefsResponse.FromString(raw)
    return response.index, wire.version_from_proto(response.version)
