"""Copies of what one call pushes, weights and the training state beside them: how they are made, and when the caller may go on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self, TypeAlias

from weighbridge._formats.push_sources import OpenSource, StagingPool, TensorSource

if TYPE_CHECKING:
    import torch

Key: TypeAlias = tuple[object, ...]
"""What tells the memory of a tensor, and how it lies there, from those of others."""
Points: TypeAlias = "Mapping[torch.device, torch.Event]"
"""What the current streams of some devices have been given by a moment."""


class Copying:
    """The copies of one push. By itself, they are made in the call.

    Attributes:
        ended: set when the caller may change its tensors: they are copied, or will not be.
    """

    def __init__(self, ended: threading.Event | None = None) -> None:
        self.ended = threading.Event() if ended is None else ended

    def is_behind(self, shards: Iterable[int]) -> bool:
        """Whether a thread copies these shards, by their indexes, behind the caller."""
        return False

    @contextmanager
    def made(self) -> Iterator[None]:
        """The block copies; all copies are made when it ends."""
        try:
            yield
        finally:
            self.ended.set()

    def kept_until(self, returned: float) -> float:
        """When the caller may go on after a push that has returned at a moment, by the monotonic clock; is asked when all copies are made."""
        return returned

    def release(self) -> None:
        """The push reads the shards no more; whoever has ended it says so once."""
        self.ended.set()


class Copies(ABC):
    """The copies of one call. Its block makes the pushes; after it the caller may change its tensors, unless that is put off."""

    def begin(self, tensors: Sequence[torch.Tensor], buffers: StagingPool) -> None:  # noqa: B027 - most wait until it is known where to
        """Begin to copy what will probably be pushed.

        Args:
            tensors: these; none if that is not known.
            buffers: where the memory for copies comes from.
        """

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - a copy more does no harm
        """Take note of tensors that nobody changes any more: they need no copy."""

    @abstractmethod
    def source(self, tensors: Sequence[torch.Tensor], staging: StagingPool) -> tuple[OpenSource, Copying]:
        """What one of the pushes reads its shards from, and how they are copied.

        Args:
            tensors: its shards.
            staging: buffers for what goes by gRPC.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - most have nothing to wait for
        """See the class."""


class CopiesInCall(Copies):
    """Copies that are made in the call, once it is known where to."""

    def source(self, tensors: Sequence[torch.Tensor], staging: StagingPool) -> tuple[OpenSource, Copying]:
        """See `Copies.source`."""
        return staged_source(tensors, staging), Copying()


def staged_source(tensors: Sequence[torch.Tensor], staging: StagingPool) -> OpenSource:
    """Makes the source for some of these tensors, which may change when they are copied."""
    return lambda indexes, stream: TensorSource(staging, stream, [tensors[index] for index in indexes])


def key_of(tensor: torch.Tensor) -> Key:
    """See `Key`."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def points_of(tensors: Iterable[torch.Tensor]) -> Points:
    """What the current streams of the tensors' GPUs have been given by now."""
    import torch

    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


@contextmanager
def on_streams(points: Points) -> Iterator[Sequence[torch.cuda.Stream]]:
    """In the block, GPUs work on streams of this thread's own, on what was there at these points."""
    import torch

    with ExitStack() as stack:
        streams = []
        for device, point in points.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(point)
            stack.enter_context(torch.cuda.stream(stream))
            streams.append(stream)
        yield streams
