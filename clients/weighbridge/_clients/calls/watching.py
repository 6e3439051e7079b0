"""Watch of refs: what opens its stream, what has come, and when it is opened again. Pure."""

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
"""Longest pause between tries to open it: engines are waiting for news."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Where a watch of refs stands.

    Attributes:
        refs: model and name of each.
        last: for each, the number of the version that came last; 0 if none has.
        backoff: of the tries to open it; once the service has accepted it, it is opened again for ever.
        accepted: whether the service has.
    """

    refs: tuple[tuple[str, str], ...]
    last: tuple[int, ...]
    backoff: Backoff
    accepted: bool = False

    @staticmethod
    def begin(refs: Iterable[tuple[str, str]], retry_seconds: float) -> Watch:
        """A watch to which nothing has come. Raises InvalidArgument if a ref is no pair of model and name."""
        found = tuple(refs)
        for ref in found:
            if [type(part) for part in ref] != [str, str]:
                raise InvalidArgument(
                    f"{ref!r} is no model with one of its refs",
                    fix='watch tuples such as ("acme/smol", "live")',
                )
        return Watch(found, (0,) * len(found), Backoff(retry_seconds, _PAUSE_SECONDS))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The refs of which no version has come yet."""
        return tuple(
            ref for ref, last in zip(self.refs, self.last, strict=True) if not last and ref[1] != RECEIVING
        )

    @property
    def call(self) -> tuple[str, bytes, Callable[[bytes], tuple[int, Version]]]:
        """What opens it from here on: path, request, and the meaning of a response: the ref's index, and the version it names."""
        there = zip(self.refs, self.last, strict=True)
        request = pb.WatchRefsRequest(refs=[_watched(*ref, last) for ref, last in there])
        return "/weighbridge.v1.ModelService/WatchRefs", request.SerializeToString(), _moved_ref

    def received(self, index: int, number: int) -> Watch:
        """After a version has come for the ref with this index."""
        last = (*self.last[:index], number, *self.last[index + 1 :])
        return replace(self.begun(), last=last)

    def begun(self) -> Watch:
        """After the service has accepted it."""
        return replace(self, accepted=True, backoff=Backoff(math.inf, _PAUSE_SECONDS))

    def left(self, now: float) -> float | None:
        """Seconds for which it is tried to open it, `now` by the monotonic clock; None if for ever."""
        return None if self.accepted else self.backoff.left(now)

    def failed(
        self, error: WeighbridgeError, *, closed: bool, now: float, jitter: float
    ) -> tuple[float, Watch]:
        """Seconds until it should be opened again, and the watch that is opened then.

        Args:
            error: what it ended with; is raised if it should not be opened again.
            closed: whether the client has been closed.
            now: seconds of the monotonic clock.
            jitter: from 0 to 1.
        """
        if isinstance(error, Unavailable) and not self.accepted:
            retry = self.backoff.after_error(error, now, jitter)
        else:  # what has been there will be there again
            retry = self.backoff.after_failure(now, jitter)
        if closed or retry is None:
            raise error
        return retry.pause, replace(self, backoff=retry.backoff)


def _watched(model: str, ref: str, last: int) -> pb.WatchedRef:
    if ref == RECEIVING:
        # access is checked by the ref that it may become
        return pb.WatchedRef(model=model, ref=REF_LIVE, receiving=True, after=last)
    return pb.WatchedRef(model=model, ref=ref, after=last)


def _moved_ref(raw: bytes) -> tuple[int, Version]:
    response = pb.WatchRefsResponse.FromString(raw)
    return response.index, wire.version_from_proto(response.version)
