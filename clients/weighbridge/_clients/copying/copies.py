"""Copies of the tensors that one call pushes, of weights and training state: how they are made, and when the caller may
change its tensors.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self, TypeAlias

from weighbridge._core.layouts import Layout
from weighbridge._formats.push_sources import HeldShards, StagingPool, TensorSource

if TYPE_CHECKING:
    import torch

Key: TypeAlias = tuple[object, ...]
"""Identity of a tensor's memory, and the tensor's layout in it."""
Points: TypeAlias = "Mapping[torch.device, torch.Event]"
"""Events on the current streams of some devices. Each event follows the work that had been enqueued at one moment."""


class Copying:
    """The copies of one push. This base class makes them in the call.

    Attributes:
        ended: set when the caller may change its tensors, because they are copied or will not be.
    """

    def __init__(self, ended: threading.Event | None = None) -> None:
        self.ended = threading.Event() if ended is None else ended

    def is_behind(self, shards: Iterable[int]) -> bool:
        """Whether a thread copies the shards with these indexes while the caller continues."""
        return False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Context in which the copies are made. All of them are made when it ends."""
        try:
            yield
        finally:
            self.ended.set()

    def kept_until(self, returned: float) -> float:
        """Return the time at which the caller may continue after a push that returned at ``returned``, by the monotonic
        clock. Called after all copies are made.
        """
        return returned

    def release(self) -> None:
        """Release the shards, which the push no longer reads.

        The caller or the thread that ends the push calls this once.
        """
        self.ended.set()


class Copies(ABC):
    """The copies of one call, as a context manager around its pushes. After the context the caller may change its
    tensors, unless the copies are deferred."""

    def begin(self, tensors: Sequence[torch.Tensor], buffers: StagingPool) -> None:  # noqa: B027 - most classes wait until the destination is known
        """Begin to copy the tensors that will probably be pushed.

        Args:
            tensors: the tensors; empty if that is not known.
            buffers: pool of memory for the copies.
        """

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - an additional copy does no harm
        """Record tensors that no longer change and therefore need not be copied."""

    @abstractmethod
    def shards(
        self, layout: Layout, tensors: Sequence[torch.Tensor], staging: StagingPool
    ) -> tuple[HeldShards, Copying]:
        """Return the shards from which one of the pushes reads, and the copies of that push.

        Args:
            layout: layout of the shards that the rank holds.
            tensors: the tensor of each shard.
            staging: buffers for the shards that are sent over gRPC.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - most classes have nothing to wait for
        """See the class."""


class CopiesInCall(Copies):
    """Copies that are made in the call, once their destination is known."""

    def shards(
        self, layout: Layout, tensors: Sequence[torch.Tensor], staging: StagingPool
    ) -> tuple[HeldShards, Copying]:
        """See `Copies.shards`."""
        return TensorSource(staging, layout, tensors), Copying()


def key_of(tensor: torch.Tensor) -> Key:
    """See `Key`."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def points_of(tensors: Iterable[torch.Tensor]) -> Points:
    """Return events that follow the work enqueued so far on the current streams of the tensors' GPUs."""
    import torch

    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


@contextmanager
def on_streams(points: Points) -> Iterator[Sequence[torch.cuda.Stream]]:
    """Context in which the current streams of the GPUs are new streams of this thread.

    They start after the work before these points.
    """
    import torch

    with ExitStack() as stack:
        streams = []
        for device, point in points.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(point)
            stack.enter_context(torch.cuda.stream(stream))
            streams.append(stream)
        yield streams
