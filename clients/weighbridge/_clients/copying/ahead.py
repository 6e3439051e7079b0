"""Copies that begin before their destination is known. They are made in host memory, from which a thread delivers the
push while the caller continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.copying.copies import (
    Copies,
    Copying,
    Key,
    key_of,
    on_streams,
    points_of,
)
from weighbridge._core.layouts import Layout
from weighbridge._formats.push_sources import (
    Bytes,
    CastingSource,
    HeldShards,
    ShardSource,
    StagingPool,
    TensorSource,
)

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class CopiesAhead(Copies):
    """Copies of tensors in host memory. They are made while the call waits for the service's plan: GPUs copy their own
    tensors, and a thread copies the others.

    Each tensor is copied once, even if it is pushed under several names. The memory is released when the last push has
    been delivered.

    Args:
        most_bytes: maximum number of bytes of host memory for copies. Tensors beyond that are copied when their
            destination is known.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._copies: dict[Key, torch.Tensor] = {}
        self._waits: list[Callable[[], object]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._given_back: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._users = 1  # the call
        self.ended = threading.Event()
        self.ended_at = 0.0

    def begin(self, tensors: Sequence[torch.Tensor], buffers: StagingPool) -> None:
        """See `Copies.begin`. All copies begin before the first push."""
        keyed = ((key_of(each), each.detach()) for each in tensors)
        new = {key: each for key, each in keyed if key not in self._copies}
        starts, nbytes = [], 0
        for each in new.values():
            starts.append(nbytes)
            nbytes += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not new or nbytes > self._left:
            return
        self._left -= nbytes
        buffer = buffers.take(nbytes, pinned=any(each.is_cuda for each in new.values()))
        self._given_back.append(partial(buffers.give, buffer))
        copies = {key: _view(buffer, start, each) for start, (key, each) in zip(starts, new.items(), strict=True)}
        self._begin_on_gpus([(copies[key], each) for key, each in new.items() if each.is_cuda])
        self._begin_on_cpu([(copies[key], each) for key, each in new.items() if not each.is_cuda])
        self._copies.update(copies)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Copies.keep`."""
        self._copies.update((key_of(each), each) for each in tensors)

    def shards(
        self, layout: Layout, tensors: Sequence[torch.Tensor], staging: StagingPool
    ) -> tuple[HeldShards, Copying]:
        """See `Copies.shards`.

        The push reads copied tensors from their copies, and gRPC sends these without another copy.
        """
        copies = [self._copies.get(key_of(each)) for each in tensors]
        pushed = [own if copy is None else copy for own, copy in zip(tensors, copies, strict=True)]
        copying = _CopyingAhead(self, frozenset(at for at, copy in enumerate(copies) if copy is not None))
        self._use()
        return _ShardsAhead(copying, CastingSource(layout, pushed), TensorSource(staging, layout, pushed)), copying

    def __exit__(self, *raised: object) -> None:
        """Wait until all copies are made. Raises the error of a copy that failed."""
        try:
            self.wait()
        except Exception:
            if raised[1] is None:
                raise
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)
            self.release()

    def wait(self) -> None:
        """Wait until all copies that have begun are made. Raises the error of a copy that failed."""
        for wait in self._waits:
            wait()
        if not self.ended.is_set():
            self.ended_at = time.monotonic()
            self.ended.set()

    def release(self) -> None:
        """Release one use of the memory; the last release returns it to the pool."""
        with self._lock:
            self._users -= 1
            unused = not self._users
        if unused:
            for give_back in self._given_back:
                give_back()

    def _use(self) -> None:
        with self._lock:
            self._users += 1

    def _begin_on_gpus(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies on their GPUs, after the work that is already enqueued there."""
        if not copies:
            return
        with on_streams(points_of(each for _, each in copies)) as streams:
            try:
                for copy, each in copies:
                    copy.copy_(each, non_blocking=True)
            finally:  # wait for enqueued copies even if others could not be enqueued
                self._waits += [stream.record_event().synchronize for stream in streams]

    def _begin_on_cpu(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start a thread that makes copies, one tensor after the other."""
        if not copies:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "copies-ahead")
        self._use()
        try:
            made = self._thread.submit(_copy, copies)
        except BaseException:
            self.release()
            raise
        made.add_done_callback(lambda _: self.release())
        self._waits.append(made.result)


class _CopyingAhead(Copying):
    """Copies of the shards of one push.

    Args:
        ahead: the copies.
        copied: indexes of the shards that are copied ahead.
    """

    def __init__(self, ahead: CopiesAhead, copied: frozenset[int]) -> None:
        super().__init__(ahead.ended)
        self._ahead = ahead
        self._copied = copied

    def is_behind(self, shards: Iterable[int]) -> bool:
        """See `Copying.is_behind`. Shards that were not expected are copied in the call."""
        return self._copied.issuperset(shards)

    @contextmanager
    def made(self) -> Iterator[None]:
        """See `Copying.made`."""
        self._ahead.wait()
        yield

    def kept_until(self, returned: float) -> float:
        """See `Copying.kept_until`. The call waits for the copies."""
        return max(returned, self._ahead.ended_at)

    def release(self) -> None:
        """See `Copying.release`."""
        self._ahead.release()


class _ShardsAhead(HeldShards):
    """Shards of which some are copied ahead.

    Args:
        copying: copies of the push.
        steady: the shards, as tensors that do not change.
        changing: the shards, as tensors that may change.
    """

    def __init__(self, copying: _CopyingAhead, steady: HeldShards, changing: HeldShards) -> None:
        self._copying = copying
        self._steady = steady
        self._changing = changing

    def select(self, indexes: Sequence[int], stream: Layout) -> ShardSource:
        """See `HeldShards.select`."""
        return (self._steady if self._copying.is_behind(indexes) else self._changing).select(indexes, stream)


def _copy(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for copy, tensor in copies:
        copy.copy_(tensor)


def _view(buffer: Bytes, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a buffer, with the shape and dtype of another tensor."""
    import torch

    return torch.from_numpy(buffer[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
