"""Copies that are begun before it is known where they go: into host memory, from which a push is delivered behind its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.copying.copies import (
    Copies,
    Copying,
    Key,
    Points,
    key_of,
    on_streams,
    points_of,
    staged_source,
)
from weighbridge._core.layouts import Layout
from weighbridge._formats.push_sources import Bytes, CastingSource, OpenSource, ShardSource, StagingPool

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class CopiesAhead(Copies):
    """Copies of tensors in host memory, which a thread makes while the call asks where they go.

    Args:
        tensors: what is expected to be pushed; each is copied once, by however many names it is pushed.
        buffers: where the memory comes from. It goes back when the last push has been delivered.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], buffers: StagingPool) -> None:
        distinct = {key_of(each): each.detach() for each in tensors}
        starts, nbytes = [], 0
        for each in distinct.values():
            starts.append(nbytes)
            nbytes += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        points = points_of(distinct.values())
        self._buffers = buffers
        self._buffer = buffers.take(nbytes, pinned=bool(points))
        self._copies = {
            key: _view(self._buffer, start, each)
            for start, (key, each) in zip(starts, distinct.items(), strict=True)
        }
        self.ended = threading.Event()
        self.ended_at = 0.0
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._users = 2  # the call, and the thread
        try:
            threading.Thread(target=self._copy, args=(distinct, points), name="copies-ahead").start()
        except BaseException:
            buffers.give(self._buffer)
            raise

    def source(self, tensors: Sequence[torch.Tensor], staging: StagingPool) -> tuple[OpenSource, Copying]:
        """See `Copies.source`. Of tensors that are copied the copies are pushed; what goes by gRPC is sent from where they lie."""
        copies = [self._copies.get(key_of(each)) for each in tensors]
        pushed = [own if copy is None else copy for own, copy in zip(tensors, copies, strict=True)]
        copying = _CopyingAhead(self, frozenset(at for at, copy in enumerate(copies) if copy is not None))
        steady, changing = CastingSource.opener(pushed), staged_source(pushed, staging)
        with self._lock:
            self._users += 1
        return partial(_opened, copying, steady, changing), copying

    def __exit__(self, *raised: object) -> None:
        """Wait until all is copied. Raises what has kept it from being."""
        try:
            self.ended.wait()
        finally:
            self.release()
        if self.error is not None and raised[1] is None:
            raise self.error

    def release(self) -> None:
        """One of the users of the memory needs it no more."""
        with self._lock:
            self._users -= 1
            unused = not self._users
        if unused:
            self._buffers.give(self._buffer)

    def _copy(self, tensors: dict[Key, torch.Tensor], points: Points) -> None:
        try:
            with on_streams(points) as streams:
                for key, each in tensors.items():
                    self._copies[key].copy_(each, non_blocking=True)
                for stream in streams:
                    stream.synchronize()
        except BaseException as error:  # goes to the call and its pushes
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            self.ended.set()
            self.release()


class _CopyingAhead(Copying):
    """The part of one push in such copies.

    Args:
        ahead: the copies.
        copied: indexes of the shards that are among them.
    """

    def __init__(self, ahead: CopiesAhead, copied: frozenset[int]) -> None:
        super().__init__(ahead.ended)
        self._ahead = ahead
        self._copied = copied

    def is_behind(self, shards: Iterable[int]) -> bool:
        """See `Copying.is_behind`. Others than those that were expected are copied in the call."""
        return self._copied.issuperset(shards)

    @contextmanager
    def made(self) -> Iterator[None]:
        """See `Copying.made`."""
        self.ended.wait()
        if self._ahead.error is not None:
            raise self._ahead.error
        yield

    def kept_until(self, returned: float) -> float:
        """See `Copying.kept_until`. The call waits for the copies."""
        return max(returned, self._ahead.ended_at)

    def release(self) -> None:
        """See `Copying.release`."""
        self._ahead.release()


def _opened(
    copying: _CopyingAhead, steady: OpenSource, changing: OpenSource, indexes: Sequence[int], stream: Layout
) -> ShardSource:
    return (steady if copying.is_behind(indexes) else changing)(indexes, stream)


def nbytes_ahead(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes are copied of these tensors, whose memory some of them may share."""
    return sum(each.nbytes for each in {key_of(each): each for each in tensors}.values())


def _view(buffer: Bytes, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a buffer, of the shape and dtype of another one."""
    import torch

    return torch.from_numpy(buffer[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
